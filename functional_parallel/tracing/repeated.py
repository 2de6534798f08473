"""Functions that a model calls for many layers: two equal calls are traced, and the ops of later ones are copied.

A call is equal to an earlier one if the function, what it reaches by its closure and by names, and all arguments but
the values of tensors are equal. See `recorded_calls` for what else is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import optree
import torch
from torch import fx

from sharding_specs import register_dataclasses

from .. import _torch
from ..errors import SideEffectWarning
from ..ir import current_source, warn_at
from .reached import ReachedState
from .record import Recorder
from .recorded_calls import Call, RecordedCall, name_of, recording_of_calls

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 10_000  # values that a call may reach. To compare more takes longer than to trace it


def repeated(f: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that a model calls for many layers: two equal calls are traced, and the ops of others copied.

    The contract is that of an inner `jax.jit`: `f` is a pure function. Its results depend only on its arguments and on
    values that it reaches and that do not change during the trace, and it changes nothing. The program is then the one
    without the mark, and each call draws its own random numbers. A deep model is lowered in less time.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> @fp.repeated
    ... def layer(w, x):
    ...     print("traced")
    ...     return torch.tanh(x @ w)
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = layer(w, x)
    ...     return x.sum()
    >>> step = fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))
    >>> step([torch.zeros(4, 4)] * 12, torch.ones(2, 4))
    traced
    traced
    tensor(0.)

    Args:
        f: a pure function. Calls are equal if shapes, dtypes and strides of tensors are equal, and all other arguments.
            What `f` reaches by closures, globals, attributes and methods is compared too. A call is traced as without
            the mark if it writes into an argument, changes what it reaches, reads values or strides of tensors, or
            reaches something that cannot be compared, such as an iterator or a `functools.lru_cache`. Outside of a
            trace, and inside `torch.func.grad`, `jvp` and `vmap`, the mark has no effect.

    Warns:
        SideEffectWarning: if two equal calls have different ops. All later ones are traced then.
    """

    @functools.wraps(f)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = recording_of_calls()
        return f(*args, **kwargs) if recording is None else _called(recording, f, args, kwargs)

    return marked


class _Known(NamedTuple):
    """What is known of equal calls. Without a recording, they are traced."""

    recorded: RecordedCall | None
    is_confirmed: bool  # whether a second call had the same ops
    kept: list[Any]  # objects with numbers in the key


def _called(recording: Recorder, f: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    register_dataclasses(args, kwargs)
    given = _Given(recording, f, args, kwargs)
    call = Call(recording, given.tensors, given.names)
    if not given.state.is_whole or not call.is_possible:
        return f(*args, **kwargs)
    key = call.key(), given.key
    known: _Known | None = recording.calls.get(key)
    if known is not None and known.is_confirmed and known.recorded is not None:
        copied: R = known.recorded.copied(call)
        return copied
    if known is not None and known.recorded is None:
        return f(*args, **kwargs)
    result: R
    result, recorded = call.run(lambda: f(*args, **kwargs))
    after = _Given(recording, f, args, kwargs)
    if after.key != given.key or not all(map(is_, after.leaves, given.leaves)) or not given.is_apart_from(result):
        recorded = None
    if recorded is not None and known is not None and known.recorded is not None:
        differs, line = known.recorded.difference(recorded)
        if differs:
            recorded = None
            _warn(f, line)
    recording.calls[key] = _Known(recorded, known is not None, given.state.kept)
    return result


def _warn(f: Callable[..., Any], line: Any) -> None:
    name = getattr(f, "__qualname__", repr(f))
    warn_at(
        current_source(),
        f"fp.repeated({name}): two equal calls have different ops, first at {line or 'their results'}. The function "
        "depends on more than its arguments and what it reaches, so every call is traced: pass the rest as arguments",
        SideEffectWarning,
    )


class _Given:
    """Arguments of a call, and the state of everything that they and the function reach."""

    def __init__(self, recording: Recorder, f: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._recording = recording
        self.leaves, tree, self._nodes = _flattened((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self._numbers = {id(x): ("argument", index) for index, x in enumerate(self.tensors)}
        self.names = set[Hashable]()  # of tensors that are not arguments
        self._constants: list[torch.Tensor] = []
        others = [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]
        added = [(index, each) for index, x in enumerate(self.tensors) if (each := _torch.added_attributes(x))]
        orders = [[*each] for each in self._nodes if isinstance(each, dict)]  # a tree has sorted keys
        objects = [each for each in self._nodes if type(each) not in (list, tuple, dict)]  # may have more attributes
        self.state = ReachedState(f, others, orders, objects, added, name_of=self._name, most=_MOST)
        self.state.kept += self._constants
        self.key = (tree, *map(type, self.leaves), self.state.key)

    def _name(self, x: torch.Tensor) -> Hashable:
        if id(x) in self._numbers:
            return self._numbers[id(x)]
        name = name_of(self._recording, x)
        self.names.add(name)
        if not isinstance(name, fx.Node):
            self._constants.append(x)
        return name

    def is_apart_from(self, result: Any) -> bool:
        """Whether the call reaches no list or other object of a result, and none occurs twice in the result.

        The leaves and the structure must be all of it: a node may have attributes, or an order, that these do not have.
        """
        register_dataclasses(result)
        leaves, tree, objects = _flattened(result)
        nodes = [id(each) for each in objects if type(each) is not tuple]
        is_new = len({*nodes}) == len(nodes) and {*nodes}.isdisjoint(map(id, (*self._nodes, *self.state.objects)))
        return is_new and ReachedState(result).key == ReachedState(tree.unflatten(leaves)).key


def _flattened(tree: Any) -> tuple[list[Any], optree.PyTreeSpec, list[Any]]:
    """Return the leaves, the structure, and the nodes that are objects."""
    found: list[Any] = []

    def is_leaf(each: Any) -> bool:
        found.append(each)
        return False

    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf)
    numbers = {*map(id, leaves), id(None)}
    return leaves, spec, [each for each in found if id(each) not in numbers]
