"""Predicate for trained leaves, and conversion of complex leaves to pairs of real numbers for training.

`torch.optim` updates the real and imaginary components of a complex parameter (`view_as_real`) as separate real
numbers. This library does the same, and a norm includes both.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from sharding_specs.pytree import Tree


def is_trained(leaf: Tree) -> TypeGuard[torch.Tensor]:
    """Whether a leaf of the parameters has a gradient: a floating-point or complex tensor.

    >>> [is_trained(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.complex64, torch.int64)]
    [True, True, False]
    """
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last dim of size two. Return a real tensor unchanged.

    >>> as_real(torch.tensor([1 + 2j]))
    tensor([[1., 2.]])
    """
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor with these real and imaginary components in the last dim."""
    return torch.view_as_complex(x.contiguous())
