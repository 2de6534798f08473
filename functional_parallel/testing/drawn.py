"""Draw arguments with the structure and shapes of given ones, and with values that reveal errors.

At a model's initial parameters some errors are invisible: norm scales are all ones, biases all zeros, and labels may
never reach the last token of the vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import optree
import torch
from torch import fx

from ..functions import PyTree
from ..ir import VIEWS, argument, as_complex, as_real, info, is_trained
from ..partitioner import prepare
from ..rules import cross_entropy
from .intermediate import traced_leaves

aten = torch.ops.aten

_MOVES = VIEWS | {
    *(aten.clone.default, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem)
}
_ANY = {aten.eq.Scalar, aten.ne.Scalar, aten.eq.Tensor, aten.ne.Tensor}  # their results do not depend on a range


def drawn_arguments(
    loss: Callable[..., PyTree], args: tuple[PyTree, ...], *, exact: bool
) -> Iterator[tuple[PyTree, ...]]:
    """Draw arguments of a function, equal in every process, as `assert_equivalent` describes.

    Later draws change less: first only the parameters, then the same two draws in the given dtypes.
    """
    ranges = _index_ranges(loss, args)
    for double in (True, False):
        for everything in (True, False):
            yield _Draw(double, everything, exact).arguments(args, ranges)


class _Draw:
    def __init__(self, double: bool, everything: bool, exact: bool) -> None:
        self.double, self.everything, self.exact = double, everything, exact
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.known: dict[int, torch.Tensor] = {}  # a tensor that is two leaves stays one tensor

    def arguments(self, args: tuple[PyTree, ...], ranges: dict[int, _Range]) -> tuple[PyTree, ...]:
        leaves, tree = optree.tree_flatten(args)
        count = len(optree.tree_leaves(args[0]))
        return tuple(tree.unflatten([self._leaf(leaves, index, index < count, ranges) for index in range(len(leaves))]))

    def _leaf(self, leaves: list[PyTree], index: int, is_parameter: bool, ranges: dict[int, _Range]) -> PyTree:
        leaf = leaves[index]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            legal = [ranges.get(other) for other, each in enumerate(leaves) if each is leaf]
            self.known[id(leaf)] = self._tensor(leaf, is_parameter, _common(legal))
        return self.known[id(leaf)]

    def _tensor(self, x: torch.Tensor, is_parameter: bool, legal: _Range | None) -> torch.Tensor:
        wide = x.detach() if is_trained(x) else x
        if self.double and is_trained(x):
            wide = wide.to(torch.complex128 if x.is_complex() else torch.float64)
        if not (is_parameter or self.everything) or not x.numel() or x.dtype == torch.bool:
            return wide
        if not is_trained(x):
            return x if is_parameter else self._integers(x, legal)
        if not x.isfinite().all():
            return wide
        return as_complex(self._floats(as_real(wide))) if x.is_complex() else self._floats(wide)

    # --- floating leaves ---

    def _floats(self, x: torch.Tensor) -> torch.Tensor:
        if self.exact:
            return self._reordered(x)
        low, high = x.min().item(), x.max().item()
        noise = self._uniform(x)
        if low >= 0 and 0 < high <= 1:
            return x * (1 - noise.abs() / 2)
        factor = 1 + noise / 2
        if low >= 0 or high <= 0:
            return x * factor if low or high else noise / 10
        return x * factor + self._uniform(x) * x.square().mean().sqrt() / 2

    def _reordered(self, x: torch.Tensor) -> torch.Tensor:
        if (x != x.flatten()[0]).any():
            return self._permuted(x)
        added = torch.randint(0, 3, x.shape, generator=self.generator, device="cpu").to(x)
        value = x.flatten()[0].item()
        return x + (added - 1 if value == 0 else added if value > 0 else -added)

    def _uniform(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.rand(x.shape, generator=self.generator, device="cpu", dtype=torch.float64) * 2 - 1).to(x)

    # --- integers ---

    def _integers(self, x: torch.Tensor, legal: _Range | None) -> torch.Tensor:
        if legal is None:
            return self._permuted(x)
        drawn = torch.randint(legal.begin, legal.end, (x.numel(),), generator=self.generator, device="cpu")
        largest, *others = torch.randperm(x.numel(), generator=self.generator, device="cpu").tolist()
        drawn[largest] = legal.end - 1
        drawn[others[:1]] = legal.begin
        if legal.ignored is not None:
            drawn[others[1 : 1 + x.numel() // 4]] = legal.ignored
        return drawn.reshape(x.shape).to(x)

    def _permuted(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.numel(), generator=self.generator, device="cpu")
        return x.flatten()[order.to(x.device)].reshape(x.shape)


# --- Legal values of integers, as far as the ops that use them prove the range ---


@dataclass(frozen=True)
class _Range:
    """Integers from `begin` to before `end`, and a label that a loss ignores, if all ops accept it."""

    begin: int
    end: int
    ignored: int | None = None


def _common(ranges: Iterable[_Range | None]) -> _Range | None:
    found = list(ranges)
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    ignored = known[0].ignored if len({each.ignored for each in known}) == 1 else None
    begin, end = max(each.begin for each in known), min(each.end for each in known)
    return _Range(begin, end, ignored) if begin < end else None


def _index_ranges(loss: Callable[..., PyTree], args: tuple[PyTree, ...]) -> dict[int, _Range]:
    leaves = optree.tree_leaves(args)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    integers = [index for index in tensors if not leaves[index].dtype.is_floating_point]
    if not integers:
        return {}
    try:
        inputs = dict(zip(tensors, prepare(traced_leaves(loss, args)).inputs, strict=True))
    except Exception:  # a function that cannot be traced is reported when it is compiled
        return {}
    found = {index: _range(inputs[index]) for index in integers if leaves[index].dtype != torch.bool}
    return {index: each for index, each in found.items() if each is not None}


def _range(node: fx.Node) -> _Range | None:
    users = [user for user in node.users if user.target not in _ANY]
    return _common(_range(user) if _moves(user) else _accepted(user, node) for user in users)


def _moves(user: fx.Node) -> bool:
    if user.target is aten._to_copy.default:
        return not info(user).aval.is_differentiable and info(user).aval.dtype != torch.bool
    return user.target in _MOVES


def _accepted(user: fx.Node, index: fx.Node) -> _Range | None:
    target, args = user.target, user.args
    if target in (cross_entropy, aten.nll_loss_forward.default) and args[0] is not index and args[1] is index:
        return _Range(0, _shape(args[0])[-1], args[4])
    if target is aten.embedding.default and args[1] is index:
        return _Range(0, _shape(args[0])[0])
    if target in (aten.gather.default, aten.index_select.default) and args[2] is index and args[0] is not index:
        return _Range(0, _shape(args[0])[argument(user, "dim")])
    if target is aten.index.Tensor and args[0] is not index:
        sizes = [_shape(args[0])[dim] for dim, each in enumerate(args[1]) if each is index]
        return _Range(0, min(sizes))
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return info(node).aval.shape
