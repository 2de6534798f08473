"""Deferred initialization: record the ops of a function, then replay them and release each tensor after use.

The function runs on tensors without memory, and its ops are recorded. The replay runs the ops in order and frees each
memory after its last op. So parameters and an optimizer's first state can be sharded leaf by leaf, and no rank ever
holds a full model. Every op can be recorded, because nothing is partitioned. The replay draws random numbers in order,
from the states that the generators had. The values are bitwise equal to the values that the function itself computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
import torch
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..functions import PyTree
from ..ir import hollow
from ..lowering import traced_in
from .generators import Generators, RecordedDraw, draws

__all__ = ["CannotDeferError", "DeferredInit", "defer_init"]

T = TypeVar("T")

_SMALL = 1024  # elements; smaller tensors get their values immediately, such as torch.linspace(0, rate, layers)


class CannotDeferError(Exception):
    """Raised for a function that cannot be recorded: it reads values, or does something that cannot be traced."""


def defer_init(f: Callable[[], tuple[T, list[Any]]]) -> tuple[T, DeferredInit]:
    """Record a function without running its ops. Return its first result, and the recording that computes its leaves.

    >>> from torch.nn.init import orthogonal_
    >>> said, recording = defer_init(lambda: ("square", [orthogonal_(torch.empty(64, 64)), 3]))
    >>> said, [getattr(leaf, "shape", None) for leaf in recording.leaves]
    ('square', [torch.Size([64, 64]), None])
    >>> for index, value in recording.made():
    ...     print(index, value if index else (value @ value.T).trace().round())
    1 3
    0 tensor(64.)

    Args:
        f: a function without arguments. It returns any value that does not hold its tensors, and a list of leaves.

    Returns:
        The first result of `f`, and the recording.

    Raises:
        CannotDeferError: if `f` cannot be recorded and must be called normally. The states of all random number
            generators are restored.
    """
    if _torch.is_inside_transform():
        raise CannotDeferError("torch.func transforms look on")
    recording = DeferredInit()
    try:
        with traced_in():
            said = recording.record(f)
        recording.require_all()
    except Exception as error:
        recording.generators.forget()
        if isinstance(error, CannotDeferError):
            raise
        raise CannotDeferError(f"on tensors without memory it raises {type(error).__name__}: {error}") from error
    return said, recording


@dataclass(frozen=True)
class _View:
    """View of a memory by a tensor at the time of an op. Later the tensor's `data` may be replaced."""

    memory: Any
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass
class _Op:
    call: Callable[..., Any]
    given: PyTree  # positional and keyword arguments
    results: list[_View | None]
    memories: set[Any]
    draw: RecordedDraw | None


class DeferredInit(_torch.TorchDispatchMode):
    """Recording of all ops that are called while this mode is active; see `defer_init`.

    Attributes:
        leaves: the leaves that the function returned. Recorded tensors have only shape, dtype and device; leaves that
            already have values are unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generators, self.leaves = Generators(), list[Any]()
        self._fakes = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[_Op] = []
        self._memory: dict[Any, torch.UntypedStorage] = {}  # storages that exist, by memory
        self._twins: dict[Any, torch.Tensor] = {}  # fake tensor of each memory
        self._parts: dict[Any, torch.Tensor] = {}  # views of the fake tensors
        self._fresh: set[Any] = set()  # memories of tensors with values that `f` made
        self._touched: set[Any] = set()  # memories of the recorded ops, which have not run
        self._wanted: list[_View | None] = []  # by leaf
        self._is_there: list[bool] = []

    # --- recording ---

    def record(self, f: Callable[[], tuple[T, list[Any]]]) -> T:
        """Call `f` and record all its ops. Return its first result."""
        with self, _Addresses(), _torch.inits_by(self.call), _torch.unlogged_fakes():
            said, leaves = f()
        self._wanted = [self._view_of(leaf) for leaf in leaves]
        self._is_there = [not isinstance(leaf, _torch.FakeTensor) for leaf in leaves]
        self.leaves = [leaf if there else hollow(leaf) for leaf, there in zip(leaves, self._is_there, strict=True)]
        return said

    def _view_of(self, leaf: Any) -> _View | None:
        is_there = not isinstance(leaf, _torch.FakeTensor)
        if is_there and not (isinstance(leaf, torch.Tensor) and _memory_of(leaf) in self._twins):
            return None  # no recorded op uses it
        return _view(self._fake(leaf, None))

    def require_all(self) -> None:
        """Check that the function keeps no tensor except its results. Such a tensor would never get a value.

        Raises:
            CannotDeferError: if it does.
        """
        made = {view.memory: view for op in self._ops for view in op.results if view is not None}
        for memory, view in made.items():
            if not memory.expired():
                raise CannotDeferError(f"it keeps a tensor of shape {view.shape} elsewhere than in what it returns")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = optree.tree_flatten((args, kwargs or {}))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        fakes = [self._fake(leaf, func) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        before = [_view(fake) for fake in fakes if isinstance(fake, torch.Tensor)]
        known = {view.memory for view in before}
        at_once = self._may_be_done(func, given, known)
        try:
            result = self._of_shapes(func, tree.unflatten(fakes))
        except _torch.DATA_DEPENDENT_ERRORS:
            if at_once:
                return self._done(func, tree.unflatten(leaves), given)
            raise CannotDeferError(f"{func} looks at the values of a tensor") from None
        results = _tensors(result)
        new = {_memory_of(leaf) for leaf in results} - known
        if at_once and sum(leaf.numel() for leaf in results if _memory_of(leaf) in new) <= _SMALL:
            return self._done(func, tree.unflatten(leaves), given)
        writes = func._schema.is_mutable
        if not new and not writes:
            return result  # a view, described where an op reads it; or a result computed from shapes
        if writes and any(_view(self._fake(leaf, func)) != view for leaf, view in zip(given, before, strict=True)):
            raise CannotDeferError(f"{func} changes in place where a tensor lies")
        self._note(func, tree.unflatten(fakes), results, new, draws(func))
        return _put_back(result, fakes, leaves)

    def call(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record a function that fills a tensor as one op. Such a function may read values."""
        with _torch.disable_modes():  # as during the dispatch of an op
            fake = self._fake(tensor, function)
            self._note(function, ((fake, *args), kwargs), [fake], set(), True)
        return tensor

    def _fake(self, tensor: torch.Tensor, func: Any) -> torch.Tensor:
        if isinstance(tensor, _torch.FakeTensor):
            return tensor
        memory = _memory_of(tensor)
        if torch.is_grad_enabled() and tensor.requires_grad and not (memory in self._fresh or func in _CUTS):
            raise CannotDeferError("it computes something of a tensor that requires a gradient, and was there before")
        if memory not in self._twins:
            self._enter(memory, tensor.detach())
        twin = self._twins[memory]
        if twin.dtype != tensor.dtype:
            raise CannotDeferError("it takes one memory for numbers of several types")
        place = (memory, tensor.shape, tensor.stride(), tensor.storage_offset())
        if place not in self._parts:
            with self._fakes:
                self._parts[place] = twin.as_strided(*place[1:])
        return self._parts[place]

    def _enter(self, memory: Any, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        twin = self._fakes.from_tensor(tensor.new_empty(0).set_(storage))  # type: ignore[call-overload]
        self._twins[memory], self._memory[_memory_of(twin)] = twin, storage

    def _may_be_done(self, func: Any, given: list[torch.Tensor], known: set[Any]) -> bool:
        """Whether an op can run immediately.

        It must not draw random numbers, use a value of a recorded op, or write to a tensor that existed before.
        """
        if draws(func) or self._touched & known or any(isinstance(leaf, _torch.FakeTensor) for leaf in given):
            return False
        return not func._schema.is_mutable or set(map(_memory_of, given)) <= self._fresh

    def _of_shapes(self, func: Any, given: PyTree) -> Any:
        """Run an op on tensors without memory.

        Generators are removed: nothing is drawn, and a generator would have to be on the device of the fake tensors.
        """
        args, kwargs = given
        without = {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items()}
        with self._fakes:
            result = func(*args, **without)
        _torch.forget_fakes(self._fakes)
        return result

    def _done(self, func: Any, of: PyTree, given: list[torch.Tensor]) -> Any:
        args, kwargs = of
        result = func(*args, **kwargs)
        self._fresh |= set(map(_memory_of, _tensors(result))) - set(map(_memory_of, given))
        return result

    def _note(self, call: Callable[..., Any], given: PyTree, results: list[Any], new: set[Any], is_draw: bool) -> None:
        views = [_view(leaf) if _memory_of(leaf) in new else None for leaf in results]
        given = _of_shape(call, given)
        taken = optree.tree_map(lambda leaf: _view(leaf) if isinstance(leaf, _torch.FakeTensor) else leaf, given)
        seen = (*optree.tree_leaves(taken), *views)
        memories = {leaf.memory for leaf in seen if isinstance(leaf, _View)}
        draw = self._draw(given[1].get("generator"), results[0].device) if is_draw else None
        self._ops.append(_Op(call, taken, views, memories, draw))
        self._touched |= memories

    def _draw(self, generator: torch.Generator | None, device: torch.device) -> RecordedDraw:
        generator = generator or _torch.default_generator(device)
        if generator is None:
            raise CannotDeferError(f"it draws random numbers on {device}, whose generator is not known")
        return self.generators.noted(generator, len(self._ops))

    # --- replay ---

    def made(self) -> Iterator[tuple[int, Any]]:
        """Run the recorded ops and yield (index, leaf) as soon as each leaf is complete.

        The memory of a leaf is released when the next one is requested. So a caller can shard each leaf and hold one
        full leaf at a time. Call it once only.
        """
        waiting: dict[Any, list[int]] = {}
        for index, view in enumerate(self._wanted):
            if view is None or view.memory not in self._touched:
                yield index, self._value(index)
            else:
                waiting.setdefault(view.memory, []).append(index)
        last = {memory: number for number, op in enumerate(self._ops) for memory in op.memories}
        replay = self.generators.replay(op.draw for op in self._ops)
        for number, op in enumerate(self._ops):
            with replay(number, op.draw):
                self._do(op)
            for memory in (each for each in op.memories if last[each] == number):
                for index in waiting.pop(memory, ()):
                    yield index, self._value(index)
                del self._memory[memory]
        replay.end()

    def _do(self, op: _Op) -> None:
        args, kwargs = optree.tree_map(lambda leaf: self._tensor(leaf) if isinstance(leaf, _View) else leaf, op.given)
        with torch.no_grad():
            results = _tensors(op.call(*args, **kwargs))
        for leaf, view in zip(results, op.results, strict=True):
            if view is not None:
                self._memory[view.memory] = _laid_out(leaf, view).untyped_storage()

    def _value(self, index: int) -> Any:
        view = self._wanted[index]
        return self.leaves[index] if view is None or self._is_there[index] else self._tensor(view)

    def _tensor(self, view: _View) -> torch.Tensor:
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        return empty.set_(self._memory[view.memory], view.offset, view.shape, view.strides)  # type: ignore[call-overload]


class _Addresses(TorchFunctionMode):
    """Mode for functions that read the address of a tensor without memory.

    It replaces the deep copy of a tensor, which modules use to copy their layers. It rejects reads of addresses.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], _torch.FakeTensor):
            if func is torch.Tensor.data_ptr:
                raise CannotDeferError("it asks where a tensor lies")
            if func is torch.Tensor.__deepcopy__:
                return _copied(*args)
        if func == _SET_DATA and isinstance(args[0], _torch.FakeTensor) != isinstance(args[1], _torch.FakeTensor):
            raise CannotDeferError("it puts a new tensor's data into one that was there before")
        return func(*args, **(kwargs or {}))


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
    return memo[id(tensor)]  # type: ignore[no-any-return]


aten = torch.ops.aten
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CUTS = (None, aten.detach.default)  # ops that have no derivative
_LIKES = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_empty_strided.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}


def _of_shape(call: Callable[..., Any], given: PyTree) -> PyTree:
    """Replace the first argument of an op that reads only its shape, so that its memory can be released earlier."""
    if call not in _LIKES:
        return given
    (like, *rest), kwargs = given
    shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return (shape, *rest), {**kwargs, "device": kwargs.get("device") or like.device}


def _tensors(tree: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> Any:
    return _torch.StorageWeakRef(tensor.untyped_storage())


def _view(fake: torch.Tensor) -> _View:
    if fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
        raise CannotDeferError(f"it makes a tensor of layout {fake.layout}, or one that is conjugated when it is read")
    where = (tuple(fake.shape), tuple(fake.stride()), int(fake.storage_offset()))
    return _View(_memory_of(fake), fake.dtype, fake.device, *where)


def _put_back(result: PyTree, fakes: list[Any], leaves: list[Any]) -> PyTree:
    """Replace each result of an in-place op by the tensor that the op was called on."""
    given = {id(fake): leaf for fake, leaf in zip(fakes, leaves, strict=True)}
    return optree.tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _laid_out(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    """Return a result with the strides and offset that the recording predicted.

    Kernels do not always return them; then the result is copied.
    """
    if tensor.stride() == view.strides and tensor.storage_offset() == view.offset:
        return tensor
    size = view.offset + 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    memory = torch.empty(size, dtype=view.dtype, device=view.device)
    memory.as_strided(view.shape, view.strides, view.offset).copy_(tensor)
    return memory
