"""Bindings of mesh axes: the bound names, their sizes, and the communicators of their collectives.

The innermost `bind` around a call gives a name its meaning: real processes, simulated ranks, a vmap level, or (without
a communicator) a trace that needs only the size. Autograd runs the backward of CUDA tensors on other threads, so every
primitive saves the environment of its forward (`snapshot`), and its backward runs inside it (`restored`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from ..errors import UnboundAxisError
from .communicator import Communicator, Lane
from .dim_split import DimSplit

MICROBATCH = "microbatch"  # axis over microbatches, which one rank runs sequentially

Axes = str | Iterable[str]


@dataclass(frozen=True)
class Binding:
    size: int
    communicator: Communicator | Lane | None  # None while tracing
    hidden: bool = False  # whether collectives over the axis are forbidden
    samples: int | None = None  # size of a batch that the axis splits into unequal chunks


Environment = Mapping[str, Binding]

_environment: ContextVar[Environment] = ContextVar("mesh axes", default=MappingProxyType({}))


def normalize_axes(axes: Axes) -> tuple[str, ...]:
    """Return one axis name, or several, as a tuple in the order given, the first one major."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a mesh axis is named by a string, not by {name!r}")
    if not names:
        raise ValueError("no mesh axis was named; give one name or a tuple of names")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"mesh axis {repeated[0]!r} is named twice in {names}; name each axis once")
    return names


# --- Binding ---


def bind(
    sizes: Mapping[str, int], communicator: Communicator | Lane | None, samples: Mapping[str, int] | None = None
) -> AbstractContextManager[None]:
    """Bind axis names to a communicator inside a `with` block; to None while a function is only traced."""
    cut = samples or {}
    bindings = {name: Binding(size, communicator, samples=cut.get(name)) for name, size in sizes.items()}
    return restored(MappingProxyType({**_environment.get(), **bindings}))


def are_bound(sizes: Mapping[str, int], communicator: Communicator | Lane) -> bool:
    """Whether these axes are already bound to `carrier` and not hidden. Their sizes are not compared."""
    found = map(_environment.get().get, sizes)
    return all(each is not None and each.communicator is communicator and not each.hidden for each in found)


def hide(names: Axes) -> AbstractContextManager[None]:
    """Forbid collectives over some axes inside a `with` block. `mesh_axis_size` still returns their sizes."""
    return _marked(normalize_axes(names), hidden=True)


def unhide(names: Iterable[str]) -> AbstractContextManager[None]:
    """Allow collectives over hidden axes inside a `with` block, which traces code that is local to them."""
    return _marked(names, hidden=False)


def _marked(names: Iterable[str], hidden: bool) -> AbstractContextManager[None]:
    bound = _environment.get()
    marked = {name: replace(bound[name], hidden=hidden) for name in names if name in bound}
    return restored(MappingProxyType({**bound, **marked}))


def trace_only() -> AbstractContextManager[None]:
    """Remove the communicators inside a `with` block: axes keep their sizes, and collectives can only be traced."""
    # A tracer that disables torch.func's levels enters this context, so that no axis is bound to a disabled level.
    bindings = {name: replace(binding, communicator=None) for name, binding in _environment.get().items()}
    return restored(MappingProxyType(bindings))


def snapshot() -> Environment:
    return _environment.get()


@contextmanager
def restored(environment: Environment) -> Iterator[None]:
    token = _environment.set(environment)
    try:
        yield
    finally:
        _environment.reset(token)


# --- Lookup ---


def current_axes() -> dict[str, int]:
    return {name: binding.size for name, binding in _environment.get().items() if not binding.hidden}


def hidden_axes() -> tuple[str, ...]:
    return tuple(name for name, binding in _environment.get().items() if binding.hidden)


def axis_size(axis: Axes) -> int:
    """Return the number of ranks along an axis, or the product over several axes, as a Python int.

    It needs no communication.

    >>> with bind({"data": 4, "tensor": 2}, None):
    ...     axis_size("data"), axis_size(("data", "tensor"))
    (4, 8)

    Args:
        axis: mesh axis or axes.

    Raises:
        UnboundAxisError: when an axis is not bound here, or is hidden.
    """
    return prod(_visible("axis_size", name).size for name in normalize_axes(axis))


def axis_dim_split(name: str) -> DimSplit:
    """Return the split of a dim over an axis: one chunk per rank, equal except for microbatches."""
    binding = _visible("axis_dim_split", name)
    return DimSplit.of(binding.size, binding.samples)


def mesh_axis_size(name: str) -> int:
    binding = _environment.get().get(name)
    return binding.size if binding is not None else _visible("mesh_axis_size", name).size


def communicator_for(operation: str, axes: Iterable[str]) -> Communicator | Lane | None:
    # The public functions split a call over axes with different communicators.
    carriers = [_visible(operation, name).communicator for name in axes]
    if any(communicator is not carriers[0] for communicator in carriers):
        raise ValueError(f"{operation} over {tuple(axes)}: these axes are bound in different places; name them apart")
    return carriers[0]


def share_communicator(operation: str, axes: Iterable[str]) -> bool:
    carriers = [_visible(operation, name).communicator for name in axes]
    return all(communicator is carriers[0] for communicator in carriers)


def _visible(operation: str, name: str) -> Binding:
    binding = _environment.get().get(name)
    if binding is not None and not binding.hidden:
        return binding
    bound = ", ".join(f"{axis}={size}" for axis, size in current_axes().items()) or "none"
    if binding is not None:
        raise UnboundAxisError(
            f"{operation} over axis {name!r}: this axis is hidden here, because the surrounding transform takes care "
            f"of it. Axes bound here: {bound}. Write the function globally with respect to {name!r}"
        )
    raise UnboundAxisError(
        f"{operation} over axis {name!r}: no such axis is bound here. Axes bound here: {bound}. "
        f"Run it through fp.shard_map, fp.compile or fp.vmap(axis_name={name!r})"
    )
