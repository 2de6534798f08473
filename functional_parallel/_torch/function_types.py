"""Types of the arguments that torch passes to the methods of an autograd.Function. torch declares them as Any."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["FunctionContext", "InDims", "VmapInfo"]

InDims = tuple[int | None, ...]  # mapped dim of every operand; None for an operand that is not mapped


class FunctionContext(Protocol):
    """Context of one call. Methods of a Function may set more attributes, which a Protocol of its own declares."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def save_for_forward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class VmapInfo(Protocol):
    """The level of a vmap rule."""

    @property
    def batch_size(self) -> int: ...
