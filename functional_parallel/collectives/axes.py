"""Which mesh axes are bound here, how large they are, and who carries their collectives.

A collective names its axes as strings. What a name means is decided by the innermost `bind` around the call: real
processes, simulated ranks, a vmap level, or (with no carrier) a trace that only needs the size.

The environment is an immutable mapping in a context variable. A context variable belongs to one thread, and autograd
runs the backward of CUDA tensors on threads of its own; so every primitive keeps its forward's environment on `ctx`
(`snapshot`) and its backward runs inside it (`restored`). This is also lexical scoping: a backward that runs after the
`bind` has ended, or inside another one, still means the axes that its forward meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from .communicator import Communicator, Lane
from .dim_split import DimSplit

__all__ = [
    "MICROBATCH",
    "Axes",
    "Binding",
    "Environment",
    "UnboundAxisError",
    "are_bound",
    "axis_dim_split",
    "axis_size",
    "bind",
    "communicator_for",
    "current_axes",
    "hidden_axes",
    "hide",
    "mesh_axis_size",
    "normalize_axes",
    "restored",
    "share_communicator",
    "snapshot",
    "trace_only",
]

MICROBATCH = "microbatch"  # the axis whose ranks one rank plays one after another

Axes = str | Iterable[str]


class UnboundAxisError(NameError):
    """A collective names an axis that nothing around it binds."""


@dataclass(frozen=True)
class Binding:
    """What one axis name means: its size, its carrier (None while tracing), whether it is hidden, and what it cuts.

    `samples` are those of a batch that the axis cuts into unequal parts; None where all parts are equal.
    """

    size: int
    carrier: Communicator | Lane | None
    hidden: bool = False
    samples: int | None = None


Environment = Mapping[str, Binding]

_environment: ContextVar[Environment] = ContextVar("mesh axes", default=MappingProxyType({}))


def normalize_axes(axes: Axes) -> tuple[str, ...]:
    """Make a tuple of axis names out of one name or several.

    >>> normalize_axes("data"), normalize_axes(["data", "tensor"])
    (('data',), ('data', 'tensor'))

    Args:
        axes: a mesh axis, or several of them, the first one major.

    Returns:
        The names, in the order given.

    Raises:
        ValueError: when a name appears twice, or there is none.
        TypeError: when a name is not a string.
    """
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


# ---------------------------------------------------------------------------------------------------------------------
# Binding
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def bind(
    sizes: Mapping[str, int], carrier: Communicator | Lane | None, samples: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Give axis names a meaning inside a `with` block, shadowing outer ones of the same name.

    >>> with bind({"data": 4}, None):
    ...     axis_size("data")
    4

    Args:
        sizes: number of ranks along each axis.
        carrier: performs the collectives of these axes; None while a function is only traced.
        samples: for an axis of microbatches that do not divide their batch, its samples.
    """
    cut = samples or {}
    bindings = {name: Binding(size, carrier, samples=cut.get(name)) for name, size in sizes.items()}
    with restored(MappingProxyType({**_environment.get(), **bindings})):
        yield


def are_bound(sizes: Mapping[str, int], carrier: Communicator | Lane) -> bool:
    """Whether these axes mean already what `bind(sizes, carrier)` would have them mean."""
    found = map(_environment.get().get, sizes)
    return all(each is not None and each.carrier is carrier and not each.hidden for each in found)


@contextmanager
def hide(names: Axes) -> Iterator[None]:
    """Forbid collectives over some axes inside a `with` block; `mesh_axis_size` still tells their size.

    >>> with bind({"data": 4}, None), hide("data"):
    ...     mesh_axis_size("data"), current_axes()
    (4, {})

    Args:
        names: the axes to hide; a name that is not bound is ignored.
    """
    environment = dict(_environment.get())
    for name in normalize_axes(names):
        if name in environment:
            environment[name] = replace(environment[name], hidden=True)
    with restored(MappingProxyType(environment)):
        yield


@contextmanager
def trace_only() -> Iterator[None]:
    """Take the carriers away inside a `with` block: axes keep their sizes, and collectives can only be traced.

    A tracer that sets torch.func's levels aside enters this, so that no axis means a level that is not there.

    >>> with bind({"data": 4}, None), staging():
    ...     carrier_for("psum", ("data",)) is None
    True
    """
    bindings = {name: replace(binding, carrier=None) for name, binding in _environment.get().items()}
    with restored(MappingProxyType(bindings)):
        yield


def snapshot() -> Environment:
    """The environment as it is now, to be entered again with `restored`."""
    return _environment.get()


@contextmanager
def restored(environment: Environment) -> Iterator[None]:
    """Enter an environment that `snapshot` returned."""
    token = _environment.set(environment)
    try:
        yield
    finally:
        _environment.reset(token)


# ---------------------------------------------------------------------------------------------------------------------
# Looking up
# ---------------------------------------------------------------------------------------------------------------------


def current_axes() -> dict[str, int]:
    """The axes that a collective may name here, with their sizes, in the order they were bound.

    >>> with bind({"data": 4, "tensor": 2}, None):
    ...     current_axes()
    {'data': 4, 'tensor': 2}
    """
    return {name: binding.size for name, binding in _environment.get().items() if not binding.hidden}


def hidden_axes() -> tuple[str, ...]:
    """The axes that surrounding transforms have yet to partition, in the order they were bound.

    >>> with bind({"data": 4, "tensor": 2}, None), hide("data"):
    ...     hidden_axes()
    ('data',)
    """
    return tuple(name for name, binding in _environment.get().items() if binding.hidden)


def axis_size(axis: Axes) -> int:
    """The number of ranks along an axis, or the product over several; a Python number, without communication.

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
    """Into which parts an axis cuts a dim: as many as it has ranks, equal but for microbatches.

    >>> with bind({"microbatch": 4}, None, {"microbatch": 11}):
    ...     axis_parts("microbatch").rows
    3

    Raises:
        UnboundAxisError: when the axis is not bound here, or is hidden.
    """
    binding = _visible("axis_parts", name)
    return DimSplit.of(binding.size, binding.samples)


def mesh_axis_size(name: str) -> int:
    """The size of an axis, hidden ones included.

    >>> with bind({"data": 4}, None), hide("data"):
    ...     mesh_axis_size("data")
    4

    Raises:
        UnboundAxisError: when the axis is not bound at all.
    """
    binding = _environment.get().get(name)
    return binding.size if binding is not None else _visible("mesh_axis_size", name).size


def communicator_for(operation: str, axes: Iterable[str]) -> Communicator | Lane | None:
    """The one carrier that all these axes share; None while tracing.

    Args:
        operation: the collective's name, for the message.
        axes: the axes it names.

    Raises:
        UnboundAxisError: when an axis is not bound here, or is hidden.
        ValueError: when the axes are carried by different carriers (the public functions split such a call).
    """
    carriers = [_visible(operation, name).carrier for name in axes]
    if any(carrier is not carriers[0] for carrier in carriers):
        raise ValueError(f"{operation} over {tuple(axes)}: these axes are bound in different places; name them apart")
    return carriers[0]


def share_communicator(operation: str, axes: Iterable[str]) -> bool:
    """Whether one carrier serves all these axes, so that one collective can go over them together."""
    carriers = [_visible(operation, name).carrier for name in axes]
    return all(carrier is carriers[0] for carrier in carriers)


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
