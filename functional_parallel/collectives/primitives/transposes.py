"""The primitives with their transposes.

The transpose of a primitive has its parameters. It applies another primitive over the same axes to the cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import State
from .emit import apply_primitive, axis_index
from .functions import define, source_of_cast

__all__: list[str] = []

Axes = tuple[str, ...]


# --- Sums ---


def _psum(cotangent: Tensor, axes: Axes, src: str) -> Tensor:
    return apply_primitive("pcast", cotangent, axes, "invariant", "reduced" if src == "unreduced" else "varying")


def _psum_scatter(cotangent: Tensor, axes: Axes, dim: int, src: str) -> Tensor:
    return apply_primitive("all_gather", cotangent, axes, dim, "reduced" if src == "unreduced" else "varying")


define("psum", State.INVARIANT, _psum)
define("psum_scatter", State.VARYING, _psum_scatter)


# --- From one chunk per rank to the full tensor, and back by a slice ---


def _all_gather(cotangent: Tensor, axes: Axes, dim: int, dst: str) -> Tensor:
    """To Varying or Reduced, sum the ranks' separate gradients. To Invariant, keep a slice of the one gradient."""
    if dst == "invariant":
        return apply_primitive("pscatter", cotangent, axes, dim)
    return apply_primitive("psum_scatter", cotangent, axes, dim, "unreduced" if dst == "reduced" else "varying")


def _pscatter(cotangent: Tensor, axes: Axes, dim: int) -> Tensor:
    return apply_primitive("all_gather", cotangent, axes, dim, "invariant")


define("all_gather", None, _all_gather)
define("pscatter", State.VARYING, _pscatter)


# --- Moves between ranks ---


def _all_to_all(cotangent: Tensor, axes: Axes, split_dim: int, concat_dim: int) -> Tensor:
    return apply_primitive("all_to_all", cotangent, axes, concat_dim, split_dim)


def _ppermute(cotangent: Tensor, axes: Axes, pairs: Sequence[int]) -> Tensor:
    inverse = [rank for source, target in zip(pairs[::2], pairs[1::2], strict=True) for rank in (target, source)]
    return apply_primitive("ppermute", cotangent, axes, inverse)


def _pbroadcast(cotangent: Tensor, axes: Axes, source: int) -> Tensor:
    """Keep the gradient on the source, and drop it elsewhere. All ranks have the same gradient."""
    own = apply_primitive("pcast", cotangent, axes, "invariant", "varying")
    is_source = (axis_index(axes) == source).to(own.device)
    return torch.where(is_source, own, torch.zeros_like(own))


define("all_to_all", State.VARYING, _all_to_all)
define("ppermute", State.VARYING, _ppermute)
define("pbroadcast", State.INVARIANT, _pbroadcast)


# --- From and to a value that one rank owns ---


def _broadcast(cotangent: Tensor, axes: Axes, owner: int, dst: str) -> Tensor:
    """Sum the ranks' separate gradients on the owner. To Invariant, take the owner's, since all ranks have the same."""
    if dst == "invariant":
        cotangent = _pbroadcast(cotangent, axes, owner)
    return apply_primitive("reduce", cotangent, axes, owner, "unreduced" if dst == "reduced" else "varying")


def _reduce(cotangent: Tensor, axes: Axes, owner: int, src: str) -> Tensor:
    return apply_primitive("broadcast", cotangent, axes, owner, "reduced" if src == "unreduced" else "varying")


def _scatter(cotangent: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
    return apply_primitive("gather", cotangent, axes, dim, owner)


def _gather(cotangent: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
    return apply_primitive("scatter", cotangent, axes, dim, owner)


define("broadcast", None, _broadcast)
define("reduce", State.OWNED, _reduce)
define("scatter", State.VARYING, _scatter)
define("gather", State.OWNED, _gather)


# --- Casts: they send nothing, but their transposes may ---

_OF_CASTS = {
    ("invariant", "varying"): ("psum", "varying"),
    ("invariant", "reduced"): ("psum", "unreduced"),
    ("reduced", "varying"): ("pcast", "varying", "unreduced"),
    ("varying", "unreduced"): ("pcast", "reduced", "varying"),
}


def _pcast(cotangent: Tensor, axes: Axes, src: str, dst: str) -> Tensor:
    operation, *params = _OF_CASTS[source_of_cast(src, dst), dst]
    return apply_primitive(operation, cotangent, axes, *params)


define("pcast", None, _pcast)


# A zero derivative of a maximum would be wrong. The correct one depends on how ties between ranks are split. A sharded
# softmax, the usual application of pmax, does not need it, because the maximum cancels.
define("pmax", State.INVARIANT)
define("pmin", State.INVARIANT)
