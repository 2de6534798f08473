"""Torch functions that a trace records as something else: attention as one op, dropout as a keyed draw.

The replacement must be written where the function still has its name, above the dispatcher, which by then has picked a
kernel for one device. Modules enter theirs with `intercept`. What torch's functions in C++ call has no such name; of
the ops that they come to, draws and writes where a mask says are replaced, with `intercept_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import _torch
from .enclosing import CapturedTensors
from .memory_layout import Layouts

__all__ = ["Interception", "intercept", "intercept_op", "replacement_of"]

_in_forwards: dict[Any, Callable[..., Any]] = {}
_in_derivatives: dict[Any, Callable[..., Any]] = {}
_always: dict[Any, Callable[..., Any]] = {}
_ops: dict[Any, Callable[..., Any]] = {}
_with_the_same_strides: set[Callable[..., Any]] = set()

_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}


def intercept(
    function: Any, *, always: bool = False, inside: bool = False, same_strides: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement for a torch function in forward traces; `always`: in others, and under derivatives, too.

    One that is always asked may return NotImplemented, to leave a call to the others. `inside` is for what a forward
    takes derivatives of itself. `same_strides`: its results have the strides of the function's; those of others count
    as unknown (see `memory_layout`).
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        (_always if always else _in_derivatives if inside else _in_forwards)[function] = replacement
        if same_strides:
            _with_the_same_strides.add(replacement)
        return replacement

    return register


def intercept_op(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what a trace records for an op, whoever calls it; it may return NotImplemented."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        _ops[op] = replacement
        return replacement

    return register


def replacement_of(op: Any) -> Callable[..., Any] | None:
    """What is recorded for an op, if something else is."""
    return _ops.get(op)


class Interception(TorchFunctionMode):
    """Active during a trace. What is replaced in forwards alone runs as it is in a trace of derivatives."""

    def __init__(self, forward_only: bool, enclosed: CapturedTensors, layouts: Layouts) -> None:
        super().__init__()
        self.forward_only, self.enclosed, self.layouts = forward_only, enclosed, layouts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.enclosed.are_in(args, kwargs):
            return self.enclosed.refuse(func, args, kwargs)
        if func in _always:
            result = self._replaced(_always[func], func, args, kwargs)
            if result is not NotImplemented:
                return result
        if self.forward_only:
            others = _in_derivatives if _torch.differentiating_level() else _in_forwards
            if func in others:
                return self._replaced(others[func], func, args, kwargs)
        inside = _unasked(func)
        if inside is None:
            return func(*args, **kwargs)
        with self:  # which torch has set aside for as long as this method runs
            return inside(*args, **kwargs)

    def _replaced(self, replacement: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        result = replacement(*args, **kwargs)
        if result is not NotImplemented and replacement not in _with_the_same_strides:
            self.layouts.leave_unknown(result, (args, kwargs), func.__name__)
        return result


def _unasked(function: Any) -> Callable[..., Any] | None:
    """A function of `torch.nn.functional` as it is after its first question, whether a mode stands for it.

    Called as it is it would ask again, forever, if the mode were active; and if not, nothing that it calls would be
    seen, such as the attention in `F.multi_head_attention_forward`.
    """
    if not isinstance(function, FunctionType) or function.__module__ != functional.__name__:
        return None
    if _QUESTIONS.isdisjoint(function.__code__.co_names):  # one that stands for those which ask
        return None
    answered = {**function.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    copy = FunctionType(function.__code__, answered, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@intercept(torch.Tensor.data.__get__, always=True, same_strides=True)  # type: ignore[attr-defined]
def _data(x: torch.Tensor) -> torch.Tensor:
    """As a `detach` that the recording sees for what it is."""
    return x.detach()


@intercept(torch.Tensor.fill_diagonal_, always=True, same_strides=True)
def _fill_diagonal_(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> Any:
    """By a mask: torch fills a strided view of the memory, and what the other views of that then hold is not known."""
    if x.ndim != 2 or wrap:
        return NotImplemented
    return x.masked_fill_(torch.eye(*x.shape, dtype=torch.bool, device=x.device), fill_value)
