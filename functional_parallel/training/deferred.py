"""Deferred initialization: record the ops of a function, then replay them and release each tensor after use.

The function runs on tensors without memory, and its ops are recorded. The replay runs the ops in order and frees each
memory after its last op. So parameters and an optimizer's first state can be sharded leaf by leaf, and no rank ever
holds a full model. Every op can be recorded, because nothing is partitioned. The replay draws random numbers in order,
from the states that the generators had. The values are bitwise equal to the values that the function itself computes.

A trace (see `tracing`) could not do this. It has values instead of memories, so an op in place would need the memory of
a second leaf, a draw into a part of a tensor would return other numbers, and a tensor could not get new `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import optree
import torch
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..functions import PyTree
from ..ir import OPS_ON_SHAPES, hollow
from ..lowering import traced_in
from ..stateful import tensors_of
from .generators import Generators
from .replay import Call, CannotDeferError, DeferredInit, Memory, RecordedOp, RecordedView, memory_of

aten = torch.ops.aten
T = TypeVar("T")
Op = torch._ops.OpOverload

_SMALL = 1024  # elements; smaller tensors get their values immediately, such as torch.linspace(0, rate, layers)


def defer_init(f: Callable[[], tuple[T, list[Any]]]) -> tuple[T, DeferredInit]:
    """Record a function without running its ops. Return its first result, and the recording that computes its leaves.

    `f` returns any value that does not hold its tensors, and a list of leaves. If it cannot be recorded, the states of
    all random number generators are restored, and it must be called normally.

    >>> from torch.nn.init import orthogonal_
    >>> said, recording = defer_init(lambda: ("square", [orthogonal_(torch.empty(64, 64)), 3]))
    >>> said, [getattr(leaf, "shape", None) for leaf in recording.leaves]
    ('square', [torch.Size([64, 64]), None])
    >>> for index, value in recording.made():
    ...     print(index, value if index else (value @ value.T).trace().round())
    1 3
    0 tensor(64.)
    """
    if _torch.is_inside_transform():
        raise CannotDeferError("torch.func transforms look on")
    recording = _Recording()
    try:
        with traced_in():
            said, deferred = recording.record(f)
        deferred.require_all()
    except Exception as error:
        recording.generators.forget()
        if isinstance(error, CannotDeferError):
            raise
        raise CannotDeferError(f"on tensors without memory it raises {type(error).__name__}: {error}") from error
    return said, deferred


class _Recording(_torch.TorchDispatchMode):
    """Mode that records ops. A tensor with values has a fake twin. Tensors in one memory have twins in one memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = Generators()
        self._fakes = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[RecordedOp] = []
        self._storages: dict[Memory, torch.UntypedStorage] = {}  # of tensors that have values
        self._twins: dict[Memory, torch.Tensor] = {}  # one for each memory, to keep the memory of the twins
        self._fresh: set[Memory] = set()  # memories of tensors with values that `f` made
        self._touched: set[Memory] = set()  # memories of the recorded ops, which have not run
        self._written: set[Memory] = set()  # memories that a recorded op writes

    def record(self, f: Callable[[], tuple[T, list[Any]]]) -> tuple[T, DeferredInit]:
        """Call `f` and record all its ops. Return its first result and the recording."""
        with self, _Functions(self), _torch.unlogged_fakes():
            said, leaves = f()
        views = [self._view_of(leaf) for leaf in leaves]
        leaves = [hollow(leaf) if isinstance(leaf, _torch.FakeTensor) else leaf for leaf in leaves]
        return said, DeferredInit(leaves, views, [*self._ops, *map(RecordedOp, self.generators.ends())], self._storages)

    def _view_of(self, leaf: PyTree) -> RecordedView | None:
        if isinstance(leaf, _torch.FakeTensor):
            return RecordedView.of(leaf)
        is_used = isinstance(leaf, torch.Tensor) and memory_of(leaf) in self._twins
        return RecordedView.of(self._twin(leaf)) if is_used else None

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        leaves, tree = optree.tree_flatten((args, kwargs or {}))
        fakes = [self._fake(leaf, func) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        views = _views(fakes)
        known = {view.memory for view in views if isinstance(view, RecordedView)}
        may_run = self._may_run(func, tensors_of(leaves), known)
        try:
            result = self._on_fakes(func, *tree.unflatten(fakes))
        except _torch.DATA_DEPENDENT_ERRORS:
            if not may_run:
                raise CannotDeferError(f"{func} looks at the values of a tensor") from None
            result = None
        made = [RecordedView.of(each) if memory_of(each) not in known else None for each in tensors_of(result)]
        if may_run and sum(prod(view.shape) for view in made if view is not None) <= _SMALL:
            return self._run(func, *tree.unflatten(leaves))
        writes = func._schema.is_mutable
        if writes and views != _views(fakes):
            raise CannotDeferError(f"{func} changes in place where a tensor lies")
        if writes or any(made):  # else it is a view, described where an op reads it, or not a tensor
            self._add(func, tree.unflatten(views), made, _is_draw(func))
            self._written |= known if writes else set()
        return _put_back(result, fakes, leaves)

    def add_initialiser(self, function: Callable[..., torch.Tensor], given: dict[str, Any]) -> None:
        """Record a function that fills a tensor as one op. Such a function may read values."""
        with _torch.disable_modes():  # as during the dispatch of an op
            view = RecordedView.of(self._fake(given["tensor"], function))
            self._add(function, ((), {**given, "tensor": view}), [None], is_draw=True)
            self._written.add(view.memory)

    def has_no_values(self, x: torch.Tensor) -> bool:
        """Whether the values of a tensor will exist only after the replay."""
        twin = self._twins.get(memory_of(x))
        return isinstance(x, _torch.FakeTensor) or (twin is not None and memory_of(twin) in self._written)

    def _add(self, call: Call, given: PyTree, made: Sequence[RecordedView | None], is_draw: bool) -> None:
        op = RecordedOp(call, _without_memory(call, given), made)
        if is_draw:
            device = next(leaf.device for leaf in (*made, *optree.tree_leaves(given)) if isinstance(leaf, RecordedView))
            generator = given[1].get("generator") or _torch.default_generator(device)
            if generator is None:
                raise CannotDeferError(f"it draws random numbers on {device}, whose generator is not known")
            op = replace(op, call=self.generators.deferred(generator, call))
        self._ops.append(op)
        self._touched |= op.memories

    def _fake(self, tensor: torch.Tensor, func: Call) -> torch.Tensor:
        if isinstance(tensor, _torch.FakeTensor):
            return tensor
        records = torch.is_grad_enabled() and tensor.requires_grad and func is not aten.detach.default
        if records and memory_of(tensor) not in self._fresh:
            raise CannotDeferError("it computes something of a tensor that requires a gradient, and was there before")
        return self._twin(tensor)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        fake = self._fakes.from_tensor(RecordedView.of(tensor).tensor(storage))  # of an alias, which may change later
        self._storages[memory_of(fake)] = storage
        self._twins.setdefault(memory_of(tensor), fake)
        return fake

    def _may_run(self, func: Op, given: Sequence[torch.Tensor], known: set[Memory]) -> bool:
        """Whether an op can run now: it draws nothing, reads no value of a recorded op, and writes only new tensors."""
        if _is_draw(func) or self._written & known or any(isinstance(x, _torch.FakeTensor) for x in given):
            return False
        return not func._schema.is_mutable or (set(map(memory_of, given)) <= self._fresh and not self._touched & known)

    def _on_fakes(self, func: Op, args: PyTree, kwargs: PyTree) -> PyTree:
        """Run an op on fake tensors. Nothing is drawn, and generators would have to be on the fakes' device."""
        without = {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items()}
        with self._fakes:
            result = func(*args, **without)
        _torch.forget_fakes(self._fakes)
        return result

    def _run(self, func: Op, args: PyTree, kwargs: PyTree) -> PyTree:
        result = func(*args, **kwargs)
        given = {memory_of(each) for each in tensors_of((args, kwargs))}
        self._fresh |= {memory_of(each) for each in tensors_of(result)} - given
        return result


class _Functions(TorchFunctionMode):
    """Mode that replaces fake tensors' deep copy, which modules use to copy layers, and rejects reads of address."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Call, types: Sequence[type], args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        initialiser = _torch.redrawing_initialiser(func)
        if initialiser is not None:
            self._recording.add_initialiser(*initialiser)
            return True  # "the tensor is on the meta device", so that the initialiser returns
        is_fake = [isinstance(arg, _torch.FakeTensor) for arg in args[:2]]
        if func in _ADDRESSES and self._recording.has_no_values(args[0]):
            raise CannotDeferError("it asks where a tensor lies")
        if func is torch.Tensor.__deepcopy__ and is_fake[0]:
            return _copied(*args)
        if func == _SET_DATA and is_fake[0] != is_fake[1]:
            raise CannotDeferError("it puts a new tensor's data into one that was there before")
        return func(*args, **(kwargs or {}))


def _copied(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
    return memo[id(tensor)]


_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.__array__}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _without_memory(call: Call, given: PyTree) -> PyTree:
    """Replace the first argument of an op that reads only its shape, so that its memory can be released earlier."""
    if call not in OPS_ON_SHAPES:
        return given
    (like, *rest), kwargs = given
    shape = torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="meta")
    return (shape, *rest), {**kwargs, "device": kwargs.get("device") or like.device}


def _is_draw(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _views(leaves: Sequence[PyTree]) -> list[PyTree]:
    return [RecordedView.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _put_back(result: PyTree, fakes: Sequence[PyTree], leaves: Sequence[PyTree]) -> PyTree:
    """Replace each result of an in-place op by the tensor that the op was called on."""
    given = {id(fake): leaf for fake, leaf in zip(fakes, leaves, strict=True)}
    return optree.tree_map(lambda leaf: given.get(id(leaf), leaf), result)
