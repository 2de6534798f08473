"""Indices that enumerate a dim, `x[torch.arange(len(x)), labels]`: one element per row, and no row moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

MESH = Mesh(axis=2)
ROWS, WIDE, DEEP = 4, 6, 3


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


H, LABELS = integers(ROWS, WIDE, DEEP), torch.tensor([5, 0, 3, 3])
OUTSIDE = torch.arange(ROWS)


def written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    y = x * 1
    y[index] = value
    return y


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "arange": lambda h, i: h[torch.arange(ROWS), i],
    "length of h": lambda h, i: h[torch.arange(h.shape[0], device=h.device, dtype=torch.int32), i],
    "start and step": lambda h, i: h[torch.arange(0, ROWS, 1), i],
    "closed over": lambda h, i: h[OUTSIDE, i],
    "literal": lambda h, i: h[torch.tensor([0, 1, 2, 3]), i],
    "from 1": lambda h, i: h[torch.arange(1, ROWS + 1) - 1, i],
    "alone": lambda h, i: h[torch.arange(ROWS)] * i[:, None, None],
    "last dim": lambda h, i: h[torch.arange(ROWS), :, i % DEEP],
    "all dims": lambda h, i: h[torch.arange(ROWS), i, i % DEEP],
    "column": lambda h, i: h[torch.arange(ROWS)[:, None], torch.stack([i, i + 1, i], 1) % WIDE],
    "expanded column": lambda h, i: h[torch.arange(ROWS)[:, None].expand(ROWS, 2), torch.stack([i, i], 1)],
    "broadcast": lambda h, i: h[torch.arange(ROWS)[:, None], torch.tensor([[0, 2]])] * i[:, None, None],
    "two enumerated": lambda h, i: h[torch.arange(ROWS)[:, None], torch.arange(WIDE)] * i[:, None, None],
    "masked score": lambda h, i: h[..., 0].log_softmax(1)[torch.arange(ROWS), i],
    "written": lambda h, i: written(h, (torch.arange(ROWS), i), h[:, 0] + 1),
    "written number": lambda h, i: written(h, (torch.arange(ROWS), i), 7.0),
    "written column": lambda h, i: written(
        h, (torch.arange(ROWS)[:, None], torch.stack([i, i + 1], 1) % WIDE), h[:, :2]
    ),
    "added": lambda h, i: h.index_put((torch.arange(ROWS)[:, None], i[:, None]), h[:, :1], accumulate=True),
}


@pytest.mark.parametrize("name", READS)
def test_rows_stay_where_they_are(name: str) -> None:
    f = READS[name]
    local = fp.compile(fp.partition(f, "axis", (P("axis"), P("axis")), P("axis"), parameters=None), MESH)
    torch.testing.assert_close(local(H, LABELS), f(H, LABELS))
    assert local.program.counts() == {}

    def loss(h: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (f(h, i) * f(h, i)).sum()

    gradient = fp.compile(fp.grad(fp.partition(loss, "axis", (P("axis"), P("axis")), parameters=None)), MESH)
    torch.testing.assert_close(gradient(H, LABELS), fp.grad(loss)(H, LABELS))
    assert set(gradient.program.counts()) <= {("psum", ("axis",))}


@pytest.mark.parametrize("f", [lambda h, i: h[torch.arange(ROWS).flip(0), i], lambda h, i: h[i % ROWS, i]])
def test_rows_in_another_order_are_gathered(f: Callable[..., torch.Tensor]) -> None:
    local = fp.compile(fp.partition(f, "axis", (P("axis"), P("axis")), parameters=None), MESH)
    assert torch.equal(local(H, LABELS), f(H, LABELS))
    assert local.program.counts()[("all_gather", ("axis",))] >= 1


def test_a_closed_over_index_that_changes_is_read_again() -> None:
    rows = torch.arange(ROWS)
    f = fp.compile(fp.partition(lambda h, i: h[rows, i], "axis", (P("axis"), P("axis"))), MESH)
    assert torch.equal(f(H, LABELS), H[rows, LABELS])
    rows.copy_(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(f(H, LABELS), H[rows, LABELS])


@given(
    ndim=st.integers(1, 4),
    enumerated=st.integers(0, 3),
    also=st.sets(st.integers(0, 3)),
    along=st.integers(0, 1),
    kind=st.sampled_from(["read", "write", "add"]),
    split=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_indexing_that_enumerates_some_dim(
    ndim: int, enumerated: int, also: set[int], along: int, kind: str, split: int, seed: int
) -> None:
    """Any dim enumerated, any others indexed, values written that broadcast; any dim sharded."""
    enumerated, split = enumerated % ndim, split % ndim
    shape = (4, 2, 6, 4)[:ndim]
    rows, columns = shape[enumerated], 3
    of_indices = (columns, rows) if along else (rows, columns)
    draw = torch.Generator().manual_seed(seed)
    numbers = {
        dim: torch.randint(0, shape[dim], (of_indices, of_indices[1:])[seed % 2], generator=draw)
        for dim in also
        if dim < ndim and dim != enumerated
    }

    def f(x: torch.Tensor) -> torch.Tensor:
        counted = torch.arange(rows) if along else torch.arange(rows)[:, None].expand(of_indices)
        index = tuple(counted if dim == enumerated else numbers.get(dim, slice(None)) for dim in range(ndim))
        if kind == "read":
            return x[index]
        if kind == "write":  # one value everywhere, as an element may be written twice
            return written(x, index, x.detach().sum())
        places = [None if isinstance(each, slice) else each for each in index]
        return torch.ops.aten.index_put(x, places, 2 * x[index][..., :1], True)

    local = fp.partition(f, "axis", (P(*[None] * split, "axis"),), parameters=None)
    x = integers(*shape, seed=seed)
    assert torch.equal(fp.compile(local, MESH)(x), f(x))
    weigh = integers(*f(x).shape, seed=1)
    loss = lambda x: (f(x) * weigh).sum()  # noqa: E731
    gradient = fp.grad(fp.partition(loss, "axis", (P(*[None] * split, "axis"),), parameters=None))
    assert torch.equal(fp.compile(gradient, MESH)(x), fp.grad(loss)(x))
