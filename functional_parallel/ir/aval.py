"""Shape, dtype and device of a tensor, without its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
_CPU = torch.device("cpu")

_FILLED = ("empty", "zeros", "ones", "full")
_NAMES = [*(f"{name}_like" for name in (*_FILLED, "rand", "randn")), *(f"new_{name}" for name in _FILLED)]
# ops that read only the shape, dtype and device of their first operand
OPS_ON_SHAPES = {getattr(torch.ops.aten, name).default for name in (*_NAMES, "new_empty_strided")}


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape, dtype and device of a tensor, without its values.

    >>> Aval((2, 3), torch.float32).nbytes
    24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = _CPU

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("bf16", "bf16").replace("int", "i")
        return f"{name}[{', '.join(map(str, self.shape))}]"


def aval_of(value: torch.Tensor) -> Aval:
    """Return shape, dtype and device of a tensor. Equal ones may share one cached object."""
    return _aval(tuple(int(size) for size in value.shape), value.dtype, value.device)


_aval = lru_cache(maxsize=4096)(Aval)


def without_memory(leaf: T) -> T | torch.Tensor:
    """Return a tensor of the same shape and dtype on the meta device. Return other leaves unchanged."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def hollow(like: T | torch.Tensor | Aval, shape: Sequence[int] | None = None) -> T | torch.Tensor:
    """Return a tensor with the memory of one element, for code that reads only its shape, dtype and device.

    >>> hollow(torch.zeros(2, 3)).shape, hollow(torch.zeros(2, 3), (4, 3)).untyped_storage().nbytes()
    (torch.Size([2, 3]), 4)
    """
    if not isinstance(like, (torch.Tensor, Aval)):
        return like
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape if shape is None else tuple(shape))
