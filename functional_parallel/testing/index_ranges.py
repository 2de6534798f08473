"""Legal values of integer arguments, as far as the ops that use them prove the range."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import optree
import torch
from torch import fx

from ..functions import PyTree
from ..ir import VIEWS, argument, info
from ..rules import cross_entropy
from .intermediate import traced_leaves

__all__ = ["Range", "common", "index_ranges"]

aten = torch.ops.aten

_MOVES = VIEWS | {
    *(aten.clone.default, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem)
}
_ANY = {aten.eq.Scalar, aten.ne.Scalar, aten.eq.Tensor, aten.ne.Tensor}  # their results do not depend on a range


@dataclass(frozen=True)
class Range:
    """Integers from `begin` to before `end`, and a label that a loss ignores, if all ops accept it."""

    begin: int
    end: int
    ignored: int | None = None


def common(ranges: Iterable[Range | None]) -> Range | None:
    """Return the values in all ranges; None if one of them is unknown, or there are none."""
    found = list(ranges)
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    ignored = known[0].ignored if len({each.ignored for each in known}) == 1 else None
    begin, end = max(each.begin for each in known), min(each.end for each in known)
    return Range(begin, end, ignored) if begin < end else None


def index_ranges(loss: Callable[..., PyTree], args: tuple[PyTree, ...]) -> dict[int, Range]:
    """Find the legal range of each integer leaf, by its number among all leaves.

    A leaf has a range if every op that uses it, after views and copies, is a lookup or a loss of classes. Equality
    tests do not count. A leaf is left out if any other op uses it. All leaves are left out if the function cannot be
    traced.
    """
    leaves = optree.tree_leaves(args)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    integers = [index for index in tensors if not leaves[index].dtype.is_floating_point]
    if not integers:
        return {}
    try:
        inputs = dict(zip(tensors, traced_leaves(loss, args).inputs, strict=True))
    except Exception:  # a function that cannot be traced is reported when it is compiled
        return {}
    found = {index: _range(inputs[index]) for index in integers if leaves[index].dtype != torch.bool}
    return {index: each for index, each in found.items() if each is not None}


def _range(node: fx.Node) -> Range | None:
    """Return the values of a node that all its users accept; None if they are unknown."""
    users = [user for user in node.users if user.target not in _ANY]
    return common(_range(user) if _moves(user) else _accepted(user, node) for user in users)


def _moves(user: fx.Node) -> bool:
    if user.target is aten._to_copy.default:
        return not info(user).aval.is_differentiable and info(user).aval.dtype != torch.bool
    return user.target in _MOVES


def _accepted(user: fx.Node, index: fx.Node) -> Range | None:
    """Return the indices that a lookup or a loss accepts; None for any other op."""
    target, args = user.target, user.args
    if target in (cross_entropy, aten.nll_loss_forward.default) and args[0] is not index and args[1] is index:
        return Range(0, _shape(args[0])[-1], args[4])
    if target is aten.embedding.default and args[1] is index:
        return Range(0, _shape(args[0])[0])
    if target in (aten.gather.default, aten.index_select.default) and args[2] is index and args[0] is not index:
        return Range(0, _shape(args[0])[argument(user, "dim")])
    if target is aten.index.Tensor and args[0] is not index:
        sizes = [_shape(args[0])[dim] for dim, each in enumerate(args[1]) if each is index]
        return Range(0, min(sizes))
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return info(node).aval.shape
