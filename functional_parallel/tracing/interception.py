"""Torch functions that a trace records as other ops: attention as one op, dropout as a keyed draw.

The replacement must happen while the function still has its name, above the dispatcher. The dispatcher selects a kernel
for one device. Modules register their replacements with `intercept`. Calls inside torch's C++ functions have no such
name. Of the ops that they dispatch, draws and masked writes are replaced with `intercept_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType, NotImplementedType
from typing import Any, TypeAlias, TypeVar

import optree
import torch
from torch.fx.node import Argument
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..ir import Args, Kwargs, declares_writes, write_by_copies
from .enclosing import CapturedTensors
from .memory_layout import Layouts

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Replaced: TypeAlias = torch.Tensor | NotImplementedType  # a result, or the call is left to others

_in_forwards: dict[Callable[..., Any], Callable[..., Any]] = {}
_in_derivatives: dict[Callable[..., Any], Callable[..., Any]] = {}
_always: dict[Callable[..., Any], Callable[..., Any]] = {}
_ops: dict[_torch.Op, Callable[..., Any]] = {}
_with_the_same_strides: set[Callable[..., Any]] = set()

_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def intercept(
    function: Callable[..., Any], *, always: bool = False, inside: bool = False, same_strides: bool = False
) -> Callable[[F], F]:
    """Register a replacement for a torch function in forward traces.

    Args:
        always: replace it in all traces, also under derivatives. If the replacement returns NotImplemented, the other
            replacements are tried.
        inside: replace it where a forward itself takes derivatives, instead of elsewhere in the forward.
        same_strides: the results have the strides of the function's results. Results of other replacements have
            unknown strides (see `memory_layout`).
    """

    def register(replacement: F) -> F:
        (_always if always else _in_derivatives if inside else _in_forwards)[function] = replacement
        if same_strides:
            _with_the_same_strides.add(replacement)
        _is_left_alone.cache_clear()
        return replacement

    return register


def intercept_op(op: _torch.Op) -> Callable[[F], F]:
    """Register a replacement for an op, regardless of its caller. The replacement may return NotImplemented."""

    def register(replacement: F) -> F:
        _ops[op] = replacement
        return replacement

    return register


def replacement_of(op: _torch.Op) -> Callable[..., Any] | None:
    return _ops.get(op)


class Interception(TorchFunctionMode):
    """Mode that calls the replacements during a trace. A trace of derivatives uses only replacements for all traces."""

    def __init__(self, forward_only: bool, enclosed: CapturedTensors, layouts: Layouts) -> None:
        super().__init__()
        self.forward_only, self.enclosed, self.layouts = forward_only, enclosed, layouts

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Argument:
        kwargs = kwargs or {}
        if _is_left_alone(func) and not self.enclosed.tensors:  # most calls: a shape, a dtype, an op
            return func(*args, **kwargs)
        if self.enclosed.are_in(args, kwargs):
            return self.enclosed.refuse(func, args, kwargs)
        if declares_writes(func) and _torch.has_functorch_level(optree.tree_leaves((args, kwargs))):
            return write_by_copies(func, args, kwargs)  # torch would not change the derivative of the written tensor
        if func in _always:
            result = self._replaced(_always[func], func, args, kwargs)
            if result is not NotImplemented:
                return result
        if self.forward_only and (func in _in_forwards or func in _in_derivatives):
            others = _in_derivatives if _torch.differentiating_level() else _in_forwards
            if func in others:
                return self._replaced(others[func], func, args, kwargs)
        inside = _unasked(func)
        if inside is None:
            return func(*args, **kwargs)
        with self:  # torch disables the mode while this method runs
            return inside(*args, **kwargs)

    def _replaced(self, replacement: Callable[..., R], func: Callable[..., Any], args: Args, kwargs: Kwargs) -> R:
        result = replacement(*args, **kwargs)
        if result is not NotImplemented and replacement not in _with_the_same_strides:
            self.layouts.leave_unknown(result, (args, kwargs), func.__name__)
        return result


@lru_cache(maxsize=4096)
def _is_left_alone(function: Callable[..., Any]) -> bool:
    is_replaced = any(function in each for each in (_always, _in_forwards, _in_derivatives))
    return not is_replaced and not declares_writes(function) and _unasked(function) is None


def _unasked(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a copy of a `torch.nn.functional` function that skips its check for an active mode.

    With this mode active, the original would call the mode forever. Without it, the mode would not see the calls
    inside, such as the attention in `F.multi_head_attention_forward`.
    """
    if not isinstance(function, FunctionType) or function.__module__ != functional.__name__:
        return None
    if _QUESTIONS.isdisjoint(function.__code__.co_names):  # a wrapper of functions that check
        return None
    answered = {**function.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    copy = FunctionType(function.__code__, answered, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@intercept(torch.Tensor.data.__get__, always=True, same_strides=True)  # type: ignore[attr-defined]
def _data(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


@intercept(torch.Tensor.fill_diagonal_, always=True, same_strides=True)
def _fill_diagonal_(x: torch.Tensor, fill_value: float, wrap: bool = False) -> Replaced:
    # torch writes into a strided view of the memory, and the contents of other views of the memory would be unknown.
    if x.ndim != 2 or wrap:
        return NotImplemented
    return x.masked_fill_(torch.eye(*x.shape, dtype=torch.bool, device=x.device), fill_value)
