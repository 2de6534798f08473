"""Trees of tensors compared: to the bit, or within rounding of a leaf's largest value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch


def assert_equal(got: Any, want: Any) -> None:
    for path, a, b in _pairs(got, want):
        assert torch.equal(a, b), (path, a, b)


def assert_close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    for path, a, b in _pairs(got, want):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        assert (a - b).abs().max() <= tolerance * b.abs().max(), (path, a, b)


def _pairs(got: Any, want: Any) -> Iterator[tuple[Any, Any, Any]]:
    assert optree.tree_structure(got) == optree.tree_structure(want)
    yield from zip(optree.tree_paths(got), optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
