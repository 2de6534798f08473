"""Draw arguments with the structure and shapes of given ones, and with values that reveal errors.

At a model's initial parameters some errors are invisible: norm scales are all ones, biases all zeros, and labels may
never reach the last token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import optree
import torch

from ..functions import PyTree
from .index_ranges import Range, common, index_ranges

__all__ = ["drawn_arguments"]

_WIDER = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def drawn_arguments(
    loss: Callable[..., PyTree], args: tuple[PyTree, ...], *, exact: bool
) -> Iterator[tuple[PyTree, ...]]:
    """Draw arguments of a function, equal in every process; the most thorough draw comes first.

    Floating leaves become float64 and keep their signs. If they are in the interval [0, 1], they stay there. With
    `exact` (sums have to stay exact) they keep their elements, in another order. Integers of the batch are drawn from
    the range that the function's own ops prove legal (rows of an embedding, classes of a cross entropy with its ignored
    label). Without such a proof they keep their elements, in another order. Booleans, integers among the parameters,
    and leaves with infinities stay.

    Later draws change less: first only the parameters, then the same two draws in the given dtypes.
    """
    ranges = index_ranges(loss, args)
    for double in (True, False):
        for everything in (True, False):
            yield _Draw(double, everything, exact).arguments(args, ranges)


class _Draw:
    """One draw of all leaves."""

    def __init__(self, double: bool, everything: bool, exact: bool) -> None:
        self.double, self.everything, self.exact = double, everything, exact
        self.generator = torch.Generator().manual_seed(0)
        self.known: dict[int, torch.Tensor] = {}  # a tensor that is two leaves stays one tensor

    def arguments(self, args: tuple[PyTree, ...], ranges: dict[int, Range]) -> tuple[PyTree, ...]:
        leaves, tree = optree.tree_flatten(args)
        count = len(optree.tree_leaves(args[0]))
        return tuple(tree.unflatten([self._leaf(leaves, index, index < count, ranges) for index in range(len(leaves))]))

    def _leaf(self, leaves: list[PyTree], index: int, is_parameter: bool, ranges: dict[int, Range]) -> PyTree:
        leaf = leaves[index]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            legal = [ranges.get(other) for other, each in enumerate(leaves) if each is leaf]
            self.known[id(leaf)] = self._tensor(leaf, is_parameter, common(legal))
        return self.known[id(leaf)]

    def _tensor(self, x: torch.Tensor, is_parameter: bool, legal: Range | None) -> torch.Tensor:
        is_inexact = x.is_floating_point() or x.is_complex()
        wide = self._widened(x.detach()) if is_inexact else x
        if not (is_parameter or self.everything) or not x.numel() or x.dtype == torch.bool:
            return wide
        if not is_inexact:
            return x if is_parameter else self._integers(x, legal)
        if not x.isfinite().all():
            return wide
        if x.is_complex():
            parts = torch.view_as_real(wide)
            return torch.view_as_complex(self._floats(parts).contiguous())
        return self._floats(wide)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        if not self.double:
            return x
        return x.to(_WIDER.get(x.dtype, x.dtype)) if x.is_complex() else x.double()

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
        """Reorder the elements; a constant leaf gets small integers added, away from zero."""
        if (x != x.flatten()[0]).any():
            return self._permuted(x)
        added = torch.randint(0, 3, x.shape, generator=self.generator).to(x)
        value = x.flatten()[0].item()
        return x + (added - 1 if value == 0 else added if value > 0 else -added)

    def _uniform(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.rand(x.shape, generator=self.generator, dtype=torch.float64) * 2 - 1).to(x)

    # --- integers ---

    def _integers(self, x: torch.Tensor, legal: Range | None) -> torch.Tensor:
        """Draw from the full legal range, with both ends and some ignored labels; without a range, reorder `x`."""
        if legal is None:
            return self._permuted(x)
        drawn = torch.randint(legal.begin, legal.end, (x.numel(),), generator=self.generator)
        largest, *others = torch.randperm(x.numel(), generator=self.generator).tolist()
        drawn[largest] = legal.end - 1
        drawn[others[:1]] = legal.begin
        if legal.ignored is not None:
            drawn[others[1 : 1 + x.numel() // 4]] = legal.ignored
        return drawn.reshape(x.shape).to(x)

    def _permuted(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.numel(), generator=self.generator)
        return x.flatten()[order.to(x.device)].reshape(x.shape)
