"""Random generators of torch, and initialisers that read the values they draw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on a device use; None for other devices than CPU and CUDA."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def redrawing_initialiser(asked: Callable[..., Any]) -> tuple[Callable[..., torch.Tensor], dict[str, Any]] | None:
    """Return the running initialiser that reads values, and its arguments. None if there is none."""
    # The initialiser of a truncated normal redraws values outside its bounds. First it reads `is_meta` of its tensor
    # (`asked`). For a tensor on the meta device it returns the tensor unchanged.
    frame = sys._getframe(1) if asked == _IS_META else None
    while frame is not None and frame.f_code is not _REDRAWS.__code__:
        frame = frame.f_back
    return frame and (_REDRAWS, {name: frame.f_locals[name] for name in signature(_REDRAWS).parameters})


_REDRAWS = torch.nn.init._no_grad_trunc_normal_
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
