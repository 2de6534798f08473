"""Signature of an argument's leaf: what a traced program depends on, as a key of caches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sharding_specs.pytree import Tree

from .aval import Aval


class TensorSignature(NamedTuple):
    """Shape, dtype and device of a tensor; the device is None if it may change."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class ValueSignature(NamedTuple):
    """Text of a leaf that is not a tensor, and its type; the type is None if it may change."""

    text: str
    type: str | None

    def __str__(self) -> str:
        return self.text


LeafSignature = TensorSignature | ValueSignature


def leaf_signature(leaf: Tree | Aval, exact: bool = False) -> LeafSignature:
    """Return the signature of a leaf. With `exact`, it includes the device of a tensor, or the type of another value.

    >>> print(leaf_signature(torch.ones(2, 3)))
    (2, 3) float32
    """
    if isinstance(leaf, (torch.Tensor, Aval)):
        return TensorSignature(tuple(leaf.shape), leaf.dtype, leaf.device if exact else None)
    return ValueSignature(repr(leaf), type(leaf).__name__ if exact else None)
