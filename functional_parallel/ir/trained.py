"""Which leaves are trained, and complex ones as the pairs of real numbers that they are trained as.

`torch.optim` updates a complex parameter as its real and imaginary parts (`view_as_real`), each a parameter of its own;
so do we, and a norm counts both.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_complex", "as_real", "is_trained"]


def is_trained(leaf: Any) -> bool:
    """Whether a leaf of the parameters has a gradient.

    >>> [is_trained(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.complex64, torch.int64)]
    [True, True, False]
    """
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def as_real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor with its parts in a last dim of two; a real one as it is.

    >>> as_real(torch.tensor([1 + 2j]))
    tensor([[1., 2.]])
    """
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: torch.Tensor) -> torch.Tensor:
    """The complex tensor with these parts."""
    return torch.view_as_complex(x.contiguous())
