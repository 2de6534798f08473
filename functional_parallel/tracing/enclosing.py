"""Captured tensors that belong to a torch.func transform around the trace.

Tracing disables the levels of such transforms. torch would then treat the tensors as constants, or assign them to a
level that the function itself opens. The derivative would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.fx.node import Argument

from .. import _torch
from ..errors import TracingError
from ..ir import Args, Kwargs, current_source
from .reached import visited


class CapturedTensors:
    """Tensors of an enclosing torch.func transform that a function reaches through its closure or globals."""

    def __init__(self, function: Callable[..., Any]) -> None:
        found = [held for held, _ in visited(function)] if _torch.is_inside_transform() else []
        tensors = (held for held in found if isinstance(held, torch.Tensor))
        self.tensors = {id(tensor): tensor for tensor in tensors if _torch.is_functorch_wrapped(tensor)}

    def are_in(self, args: Args, kwargs: Kwargs) -> bool:
        return bool(self.tensors) and any(id(leaf) in self.tensors for leaf in optree.tree_leaves((args, kwargs)))

    def refuse(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Argument:
        """Refuse a call on one of the tensors. Reads of results that are not tensors, such as a shape, are allowed."""
        result = func(*args, **kwargs) if getattr(func, "__name__", "") in _QUESTIONS else NotImplemented
        if result is not NotImplemented and not isinstance(result, torch.Tensor):
            return result
        one = next(leaf for leaf in optree.tree_leaves((args, kwargs)) if id(leaf) in self.tensors)
        raise TracingError(
            f"{current_source() or 'the function'}: it closes over a tensor of shape {tuple(one.shape)} that a "
            "torch.func transform around it differentiates or maps. It would be a constant; pass it as an argument"
        )


_QUESTIONS = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__repr__"}
