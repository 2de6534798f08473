"""Shape, dtype and device of a tensor, without its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import optree
import torch

from sharding_specs.pytree import Tree

from .abstract import without_values

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
    return _aval(tuple(value.shape), value.dtype, value.device)


_aval = lru_cache(maxsize=4096)(Aval)


def in_main_memory(x: torch.Tensor | Aval) -> bool:
    """Whether a tensor lies in the processor's memory. Kernels that are tuned for its caches are for such tensors."""
    return x.device.type == "cpu"


def without_memory(leaf: T) -> T | torch.Tensor:
    """Return a tensor of the same shape and dtype on the meta device. Return other leaves unchanged."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def scalar_beside(tree: Tree, value: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a scalar on the device of the first tensor of a tree; in main memory if there is none, or it is on meta.

    >>> scalar_beside({"w": torch.zeros(2)}, 3, torch.int64)
    tensor(3)
    """
    first = next((leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.is_meta:
        return torch.tensor(value, dtype=dtype, device="cpu")
    return first.new_full((), value, dtype=dtype)


def hollow(like: T | torch.Tensor | Aval, shape: Sequence[int] | None = None) -> T | torch.Tensor:
    """Return a tensor with the memory of one element, for code that reads only its shape, dtype and device.

    >>> hollow(torch.zeros(2, 3)).shape, hollow(torch.zeros(2, 3), (4, 3)).untyped_storage().nbytes()
    (torch.Size([2, 3]), 4)
    """
    if not isinstance(like, (torch.Tensor, Aval)):
        return like
    shape = like.shape if shape is None else tuple(shape)
    return without_values((), like.dtype, like.device).expand(shape)
