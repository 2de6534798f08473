"""Compare pytrees leaf by leaf, with a message that reports the position and the size of a difference."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths

from ..errors import NotEquivalentError
from ..functions import PyTree
from ..ir import as_real

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_ROUNDINGS = 8  # a leaf of rounding errors alone sums several; one rounding was 1.02 times too few in a batch norm
_NOT_A_NUMBER = "NaN on both sides, where nothing can be compared; choose arguments that have a value and a gradient"


def compare(
    got: PyTree, want: PyTree, what: str, *, exact: bool = False, rtol: float | Sequence[float] | None = None
) -> None:
    """Raise an error that names the first leaf that differs, unless two trees are equal.

    `rtol` is the largest |got − want| allowed, relative to the largest |want| of the leaf, for all leaves or for each.
    A leaf may consist of rounding errors alone, so each may differ by eight roundings of the largest leaf.
    """
    register_dataclasses(got, want)
    if optree.tree_structure(got) != optree.tree_structure(want):
        raise NotEquivalentError(f"{what}: structures differ: {tree_paths(got)} and {tree_paths(want)}")
    paths, rounding = tree_paths(want), 0.0 if exact else _rounding(want)
    allowed = rtol if isinstance(rtol, Sequence) else [0.0 if exact else rtol] * len(paths)
    for path, a, b, most in zip(paths, optree.tree_leaves(got), optree.tree_leaves(want), allowed, strict=True):
        problem = _difference(a, b, most, rounding)
        if problem:
            raise NotEquivalentError(f"{what}{f', leaf {path}' if path else ''}: {problem}")


def tolerance_of(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 0.0)


def _rounding(tree: PyTree) -> float:
    leaves = (as_real(leaf.detach()) for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    sizes = ((leaf[leaf.isfinite()].abs(), leaf.dtype) for leaf in leaves if leaf.is_floating_point())
    precise = torch.finfo(torch.float32).eps  # the rounding of a narrower dtype would hide real differences
    found = (size.max().item() * min(torch.finfo(dtype).eps, precise) for size, dtype in sizes if size.numel())
    return _ROUNDINGS * max(found, default=0.0)


def _difference(got: PyTree, want: PyTree, rtol: float | None, rounding: float) -> str | None:
    if not (isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)):
        return None if type(got) is type(want) and got == want else f"{got!r}, not {want!r}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if torch.equal(got, want) or not want.numel():
        return None
    return _of_elements(as_real(got), as_real(want), rtol, rounding)


def _of_elements(got: torch.Tensor, want: torch.Tensor, rtol: float | None, rounding: float) -> str | None:
    finite = want[want.isfinite()].double().abs()
    allowed, scale = 0.0, finite.max().item() if finite.numel() else 0.0
    if want.is_floating_point():
        allowed = (tolerance_of(want.dtype) if rtol is None else rtol) * scale + rounding
    neither = got.isnan() & want.isnan()
    difference = (got.double() - want.double()).abs()
    wrong = (got != want) & ~neither  # not on float64, which rounds integers above 2^53
    if allowed:
        wrong &= ~(difference <= allowed)
    if not wrong.any():
        return f"at {_place(neither)}: {_NOT_A_NUMBER}" if neither.any() else None
    largest = torch.where(wrong, difference, -1.0)  # NaN counts as the largest
    where = _place(largest)
    return (
        f"at {where}: {got[where].item()!r}, not {want[where].item()!r}; largest difference "
        f"{largest[where].item():.3g}, allowed {allowed:.3g} (largest value {scale:.3g})"
    )


def _place(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(x.double().argmax(), x.shape))
