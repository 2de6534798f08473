"""Running autograd.Functions, which torch does not report, and types of the arguments of their methods."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import FunctionCtx

InDims = tuple[int | None, ...]  # mapped dim of every operand; None for an operand that is not mapped


class FunctionContext(FunctionCtx):
    """Context of one call. Methods of a Function may set more attributes, which a subclass declares."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class VmapInfo(Protocol):
    @property
    def batch_size(self) -> int: ...


def without_zeros(function: Any) -> Any:
    """Let a Function return no gradients where its results have none. torch would give it zeros for them."""
    setup_context, backward = function.setup_context, function.backward

    def setup(ctx: FunctionContext, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    def gradients(ctx: FunctionContext, *cotangents: Tensor | None) -> Any:
        is_read = any(each is not None for each in cotangents)
        return backward(ctx, *cotangents) if is_read else (None,) * len(ctx.needs_input_grad)

    function.setup_context, function.backward = staticmethod(setup), staticmethod(gradients)
    return function


_APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def running_functions(since: CodeType) -> list[type]:
    """Return the autograd.Functions with running forwards inside the innermost call of `since`, innermost first."""
    # They are found by the frames of `apply`. Since torch 2.14 `apply` is in C++, and they are found by the frames of
    # their forwards. A forward always has a frame: torch reads its signature, which a C function does not have.
    frames = list(_frames(since))
    running = _by_forwards(frames) if _APPLY is None else [f.f_locals["cls"] for f in frames if f.f_code is _APPLY]
    return [cls for cls, _ in groupby(running)]  # torch.func calls a Function once per level


def _by_forwards(frames: Sequence[FrameType]) -> list[type]:
    codes = {id(frame.f_code) for frame in frames}
    forwards: dict[int, list[tuple[type, Any]]] = {}
    for cls in _all_functions():
        forward = _innermost(cls.forward)
        code = _code_of(forward)
        if id(code) in codes:
            forwards.setdefault(id(code), []).append((cls, forward))
    found: list[type] = []
    for frame in frames:
        found += [cls for cls, forward in forwards.get(id(frame.f_code), ()) if _runs(frame, forward)][:1]
    return found


def _frames(since: CodeType) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not since:
        yield frame
        frame = frame.f_back


def _all_functions() -> Iterator[Any]:
    classes: list[Any] = [torch.autograd.Function]
    while classes:
        cls = classes.pop()
        yield cls
        classes += cls.__subclasses__()


def _innermost(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside decorators and partials. The code of a decorator is shared by all its uses."""
    forward = inspect.unwrap(forward)
    return _innermost(forward.func) if isinstance(forward, partial) else forward


def _code_of(forward: Callable[..., Any]) -> CodeType | None:
    return getattr(forward if isinstance(forward, FunctionType) else type(forward).__call__, "__code__", None)


def _runs(frame: FrameType, forward: Callable[..., Any]) -> bool:
    """Whether a frame with the code of `forward` runs it. Closures with other free variables share the same code."""
    held, code = frame.f_locals, frame.f_code
    if not isinstance(forward, FunctionType):
        return bool(code.co_varnames) and held.get(code.co_varnames[0]) is forward
    cells = zip(code.co_freevars, forward.__closure__ or (), strict=True)
    return all(name in held and held[name] is cell.cell_contents for name, cell in cells)


def quick_apply(function: Any) -> Callable[..., Tensor]:
    """Return `function.apply` for calls `(tensor, tensor or None, *other arguments)` that return a new tensor.

    In `torch.func.grad`, torch makes two classes for each call of a Function. Here one serves all its calls.
    """

    def lowered(x: Tensor, *rest: Any) -> Tensor:
        level = retrieve_current_functorch_interpreter()
        with torch.enable_grad(), _set_fwd_grad_enabled(True), level.lower():
            result = apply(_unwrap_for_grad(x, level.level()), *rest)
        return _wrap_for_grad(result, level.level())

    methods = {name: staticmethod(getattr(function, name)) for name in ("setup_context", "backward", "jvp")}
    base: Any = torch.autograd.function._SingleLevelFunction
    of_level: Any = type(f"{function.__name__}Generated", (base,), {"forward": staticmethod(lowered), **methods})

    def apply(x: Tensor, *rest: Any) -> Any:
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(apply, (x,), x, *rest)
        if not torch._C._are_functorch_transforms_active():
            is_recorded = x.requires_grad and torch.is_grad_enabled()
            has_tangent = forward_ad._current_level >= 0
            return (function.apply if is_recorded or has_tangent else function.forward)(x, *rest)
        level = retrieve_current_functorch_interpreter()
        if level.key() != TransformType.Grad or rest[0] is not None:
            return function.apply(x, *rest)
        with enable_single_level_autograd_function():
            return of_level.apply(level._cptr.lift(torch._C._functorch.unwrap_if_dead(x)), *rest)

    return apply
