"""Cache of the results of ops on fake tensors, by the metadata of their operands.

torch has one too. It calls an op through the dispatcher before it looks the op up, its keys are objects, and it makes
a result with the constructor of FakeTensor. With it, a trace takes almost twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .ops import Op, is_composite
from .transforms import disable_torch_function, is_above_autograd

_STATIC = {bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None)}
_PURE = ("aten", "prims", "fp")  # the fake function of a user's op may read anything
_READ_MORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_LIFTS = {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}


class FakeResults:
    """Results of the ops of one fake mode that read only metadata of their operands."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple[Any, ...], _Recipe | None] = {}  # None for a result that cannot be made

    def call(
        self, op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], state: Hashable
    ) -> Any:
        """Return the result of `function(*args, **kwargs)`, which computes `op` on fake tensors.

        `state` has the other facts of its shape.
        """
        if not _reads_only_metadata(op) or torch.is_inference_mode_enabled() or is_above_autograd():
            return function(*args, **kwargs)
        return self._found(op, function, args, kwargs, state)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new contiguous tensor. The mode must be active."""
        op = torch.ops.aten.empty.memory_format
        found: torch.Tensor = self._found(op, op, (list(shape),), {"dtype": dtype, "device": device}, None)
        return found

    def _found(
        self, op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], state: Hashable
    ) -> Any:
        parts: list[Any] = [op, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), state]
        operands: list[FakeTensor] = []
        with disable_torch_function():
            is_whole = self._add(parts, operands, args)
            for name, value in kwargs.items():
                parts.append(name)
                is_whole = is_whole and self._add(parts, operands, (value,))
            key = tuple(parts) if is_whole and (operands or torch._C._get_default_device() == "cpu") else None
            found = self._known.get(key) if key is not None else None
            if found is not None:
                return found.made(operands)
        result = function(*args, **kwargs)
        if key is not None and key not in self._known:
            with disable_torch_function():
                self._known[key] = _recipe(result, operands)
        return result

    def _add(self, key: list[Any], operands: list[FakeTensor], values: Iterable[Any]) -> bool:
        """Add the arguments of a call to its key. Return whether they determine the result."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None or value.layout is not torch.strided:
                    return False
                operands.append(value)
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                key += (value.requires_grad, _properties(value))
            elif kind in _STATIC:
                key += (kind, value)  # 1 equals 1.0, but their results may differ in dtype
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._add(key, operands, value):
                    return False
            elif kind is torch.device and (value.type == "cpu" or value.index is not None):
                key.append(value)  # without an index it is the current device
            else:
                return False
        return True


@lru_cache(maxsize=4096)
def _reads_only_metadata(op: Op) -> bool:
    if op.namespace not in _PURE or op in _LIFTS or op._schema.is_mutable or is_composite(op):
        return False
    return op is torch.ops.aten.index.Tensor or _READ_MORE.isdisjoint(op.tags)


def _properties(x: torch.Tensor) -> int:
    """Return the dispatch keys of a tensor. They tell whether it is lazily conjugated or negated, or quantized."""
    found: int = torch._C._dispatch_keys(x).raw_repr()
    return found


class _TensorRecipe(NamedTuple):
    """How to make a tensor: with new memory, or with the memory of the only operand."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    state: dict[str, Any]  # attributes of the fake tensor

    def made(self, operands: Sequence[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if self.is_view:
                plain = torch.empty((), dtype=self.dtype, device="meta")
                plain.set_(operands[0].untyped_storage(), self.offset, self.shape, self.stride)
            else:
                plain = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        fake = _fake(plain, self.device)
        vars(fake).update(self.state)
        if fake.fake_mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        return fake


def _fake(plain: torch.Tensor, device: torch.device) -> FakeTensor:
    return torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)


class _SequenceRecipe(NamedTuple):
    """How to make several results. A part that is not a tensor is a number or None."""

    kind: type[Any]  # list or tuple
    parts: list[Any]

    def made(self, operands: Sequence[FakeTensor]) -> Any:
        return self.kind(each.made(operands) if isinstance(each, _TensorRecipe) else each for each in self.parts)


_Recipe: TypeAlias = _TensorRecipe | _SequenceRecipe


def _recipe(result: Any, operands: Sequence[FakeTensor]) -> _Recipe | None:
    """Return how to make the result of an op again. None if that would differ from the result."""
    is_one = type(result) is FakeTensor
    if not is_one and type(result) not in (list, tuple):
        return None
    parts: list[Any] = []
    memory, new = {_memory(x) for x in operands}, set[int]()
    for each in (result,) if is_one else result:
        if type(each) in _STATIC:
            parts.append(each)
            continue
        if type(each) is not FakeTensor or each.layout is not torch.strided or _memory(each) in new:
            return None
        is_view = _memory(each) in memory
        new |= {_memory(each)} - memory
        offset, state = int(each.storage_offset()), dict(vars(each))
        parts.append(_TensorRecipe(each.shape, each.stride(), offset, each.dtype, each.fake_device, is_view, state))
        if (is_view and len(operands) > 1) or not _makes(parts[-1], each, operands):
            return None
    return parts[0] if is_one else _SequenceRecipe(type(result), parts)


def _makes(part: _TensorRecipe, x: FakeTensor, operands: Sequence[FakeTensor]) -> bool:
    if any(x is each for each in operands) or x.requires_grad or x.constant is not None:
        return False
    try:
        again = part.made(operands)
    except (AttributeError, RuntimeError, TypeError):  # a torch that makes fake tensors otherwise
        return False
    sizes = [each.untyped_storage().nbytes() for each in (x, again)]
    return _properties(x) == _properties(again) and sizes[0] == sizes[1]


def _memory(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
