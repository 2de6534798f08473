"""The primitives with their transposes: each applies another primitive over the same axes to the cotangent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import State
from .autograd_function import define, source_of_cast
from .emit import apply_primitive, axis_index

__all__: list[str] = []

Axes = tuple[str, ...]

_OF_SUM = {"unreduced": "reduced"}  # state of the gradient of a sum's operand, by the state of the operand
_OF_COPIES = {"reduced": "unreduced"}  # state of the gradients of the copies of a value, by their state


def _by(primitive: Callable[..., tuple[Any, ...]]) -> Callable[..., Tensor]:
    def transpose(cotangent: Tensor, axes: Axes, *params: Any) -> Tensor:
        operation, *own = primitive(*params)
        return apply_primitive(operation, cotangent, axes, *own)

    return transpose


# --- Sums ---

define("psum", State.INVARIANT, _by(lambda src: ("pcast", "invariant", _OF_SUM.get(src, "varying"))))
define("psum_scatter", State.VARYING, _by(lambda dim, src: ("all_gather", dim, _OF_SUM.get(src, "varying"))))


# --- From one chunk per rank to the full tensor, and back by a slice ---


def _all_gather(dim: int, dst: str) -> tuple[Any, ...]:
    """To Varying or Reduced, sum the ranks' separate gradients. To Invariant, keep a slice of the one gradient."""
    return ("pscatter", dim) if dst == "invariant" else ("psum_scatter", dim, _OF_COPIES.get(dst, "varying"))


define("all_gather", None, _by(_all_gather))
define("pscatter", State.VARYING, _by(lambda dim: ("all_gather", dim, "invariant")))


# --- Moves between ranks ---


def _inverse(pairs: Sequence[int]) -> list[int]:
    return [rank for source, target in zip(pairs[::2], pairs[1::2], strict=True) for rank in (target, source)]


def _pbroadcast(cotangent: Tensor, axes: Axes, source: int) -> Tensor:
    """Keep the gradient on the source, and drop it elsewhere. All ranks have the same gradient."""
    own = apply_primitive("pcast", cotangent, axes, "invariant", "varying")
    is_source = (axis_index(axes) == source).to(own.device)
    return torch.where(is_source, own, torch.zeros_like(own))


define("all_to_all", State.VARYING, _by(lambda split_dim, concat_dim: ("all_to_all", concat_dim, split_dim)))
define("ppermute", State.VARYING, _by(lambda pairs: ("ppermute", _inverse(pairs))))
define("pbroadcast", State.INVARIANT, _pbroadcast)


# --- From and to a value that a single rank owns ---


def _broadcast(cotangent: Tensor, axes: Axes, owner: int, dst: str) -> Tensor:
    """Sum the ranks' separate gradients on the owner. To Invariant, take the owner's, since all ranks have the same."""
    if dst == "invariant":
        cotangent = _pbroadcast(cotangent, axes, owner)
    return apply_primitive("reduce", cotangent, axes, owner, _OF_COPIES.get(dst, "varying"))


define("broadcast", None, _broadcast)
define("reduce", State.OWNED, _by(lambda owner, src: ("broadcast", owner, _OF_SUM.get(src, "varying"))))
define("scatter", State.VARYING, _by(lambda dim, owner: ("gather", dim, owner)))
define("gather", State.OWNED, _by(lambda dim, owner: ("scatter", dim, owner)))


# --- Casts: they send nothing, but their transposes may ---

_OF_CASTS = {
    ("invariant", "varying"): ("psum", "varying"),
    ("invariant", "reduced"): ("psum", "unreduced"),
    ("reduced", "varying"): ("pcast", "varying", "unreduced"),
    ("varying", "unreduced"): ("pcast", "reduced", "varying"),
}
define("pcast", None, _by(lambda src, dst: _OF_CASTS[source_of_cast(src, dst), dst]))


# A zero derivative of a maximum would be wrong. The correct one depends on how ties between ranks are split. A sharded
# softmax, the usual application of pmax, does not need it, because the maximum cancels.
define("pmax", State.INVARIANT)
define("pmin", State.INVARIANT)
