"""Ops that ask where along a dim something lies get the positions of the whole dim, however it is split.

A dim may be split inside a factor: by a spec, `P((3, "tensor"))`, or because another axis split it too and was gathered
since, as where every sample of a batch meets every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.collectives.dim_split import DimSplit
from sharding_specs import Mesh, P

from .random_functions import apart

SIZE, SAMPLES = 12, 8

#: (blocks, ranks) of which every product divides SIZE
BLOCKS = st.sampled_from([(1, 2), (2, 2), (3, 2), (6, 2), (1, 4), (3, 4), (2, 1)])

Along = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _triangle(x: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(size) for size in x.shape)
    return rows[:, None] >= columns


def _columns(index: torch.Tensor) -> torch.Tensor:
    return (index[:, None] + torch.arange(SIZE)) % SIZE


#: (x, positions, dim) → a tensor; x is (SIZE, SIZE), there are SAMPLES positions
ALONG: dict[str, Along] = {
    "embedding": lambda x, i, dim: F.embedding(i, x),
    "embedding with padding": lambda x, i, dim: F.embedding(i, x, padding_idx=5),
    "index_select": lambda x, i, dim: x.index_select(dim, i),
    "gather": lambda x, i, dim: x.gather(dim, _columns(i) if dim == 0 else _columns(i).T.repeat(2, 1)[:SIZE]),
    "take_along_dim": lambda x, i, dim: x.take_along_dim(i[:, None] if dim == 0 else i[None], dim),
    "index": lambda x, i, dim: x[i] if dim == 0 else x[:, i],
    "index of pairs": lambda x, i, dim: x[i, i.flip(0)],
    "select": lambda x, i, dim: x.select(dim, 7),
    "slice": lambda x, i, dim: x.narrow(dim, 3, 6),
    "every other": lambda x, i, dim: x[1::2] if dim == 0 else x[:, 1::2],
    "every third": lambda x, i, dim: x[2:11:3] if dim == 0 else x[:, ::3],
    "split": lambda x, i, dim: x.split([4, 8], dim)[1],
    "chunk": lambda x, i, dim: x.chunk(3, dim)[1],
    "roll": lambda x, i, dim: x.roll(5, dim),
    "flip": lambda x, i, dim: x.flip(dim),
    "pad": lambda x, i, dim: F.pad(x, (1, 2) if dim else (0, 0, 1, 2)),
    "cumsum": lambda x, i, dim: x.cumsum(dim),
    "tril": lambda x, i, dim: x.tril(),
    "triu": lambda x, i, dim: x.triu(2),
    "mask of positions": lambda x, i, dim: x.masked_fill(_triangle(x), 0),
    "arange": lambda x, i, dim: x * (torch.arange(SIZE) if dim else torch.arange(SIZE)[:, None]),
    "sort": lambda x, i, dim: apart(x, dim).sort(dim).values,
    "topk": lambda x, i, dim: apart(x, dim).topk(3, dim).values,
    "maximum": lambda x, i, dim: apart(x, dim).max(dim).values,
    "argmax": lambda x, i, dim: x.sum(1 - dim) * apart(x, dim).argmax(dim),
    "order": lambda x, i, dim: x * apart(x, dim).sort(dim).indices,
    "scatter": lambda x, i, dim: x.scatter(0, i.sort().values[None, :].clone(), 3.0),
    "scatter_add": lambda x, i, dim: x.scatter_add(0, _columns(i), torch.ones(SAMPLES, SIZE, dtype=x.dtype)),
    "index_put": lambda x, i, dim: x.index_put((i,), x[:SAMPLES] * 2, accumulate=True),
    "one_hot": lambda x, i, dim: (i[:, None] == torch.arange(SIZE)).to(x.dtype) @ x,
    "nll_loss": lambda x, i, dim: F.nll_loss(x[:SAMPLES] if dim else x.T[:SAMPLES], i, reduction="none"),
    "dropout": lambda x, i, dim: fp.random.dropout(x, 0.5, key=fp.random.key(0)),
}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.filterwarnings("ignore:no sharding rule")
@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(ALONG)),
    blocks=BLOCKS,
    data=st.sampled_from([1, 2]),
    stage=st.sampled_from([0, 1, 3]),
    microbatches=st.sampled_from([None, 2, 3]),
    dim=st.sampled_from([0, 1]),
    split=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_positions_are_of_the_whole_dim(
    name: str, blocks: tuple[int, int], data: int, stage: int, microbatches: int | None, dim: int, split: int, seed: int
) -> None:
    """Split along the dim in question or the other, the samples over ranks and microbatches, even or not."""
    factor, ranks = blocks
    spec = P(*[None] * split, (factor, "tensor"))

    def loss(w: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = ALONG[name](w, positions, dim)
        return (found * (torch.arange(found.numel()) % 5).reshape(found.shape)).sum()

    steps: list[Any] = [fp.tensor_parallel("tensor", spec), fp.zero(stage, "data")]
    plan = fp.chain(*steps, *([] if microbatches is None else [fp.accumulate(microbatches)]))
    positions = numbers(seed + 1, SAMPLES).long().abs() * 5 % SIZE
    mesh = Mesh(data=data, tensor=ranks)
    fp.testing.assert_equivalent(loss, plan, mesh, numbers(seed, SIZE, SIZE), positions, exact=True)


#: every sample against every other: (scores of pairs) → a number
PAIRS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda scores: F.cross_entropy(scores, torch.arange(len(scores))),
    "cross_entropy of columns": lambda scores: F.cross_entropy(scores.T, torch.arange(len(scores)).flip(0)),
    "nll_loss": lambda scores: F.nll_loss(scores, torch.arange(len(scores)).flip(0), reduction="sum"),
    "gather": lambda scores: scores.gather(1, torch.arange(len(scores)).roll(1)[:, None]).square().sum(),
    "index_select": lambda scores: scores.index_select(1, torch.tensor([1, 6, 3, 1])).square().sum(),
    "diagonal": lambda scores: scores.diagonal().square().sum(),
    "tril": lambda scores: scores.tril(1).square().sum(),
}


@pytest.mark.filterwarnings("ignore:no sharding rule")
@settings(max_examples=10)
@given(
    name=st.sampled_from(sorted(PAIRS)),
    ranks=st.sampled_from([(1, 2), (2, 2), (4, 1), (1, 1)]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 99),
)
@example(name="cross_entropy", ranks=(2, 2), stage=3, microbatches=2, seed=0)  # gathered again, over the mesh alone
def test_every_sample_meets_every_other(
    name: str, ranks: tuple[int, int], stage: int, microbatches: int | None, seed: int
) -> None:
    """The batch is split over two axes and microbatches, of which each sees the others' splits as blocks."""

    def loss(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return PAIRS[name]((a @ w) @ b.T)

    plan = fp.chain(fp.zero(stage, "shard"), fp.data_parallel("replica"))
    plan = plan if microbatches is None else fp.chain(plan, fp.accumulate(microbatches))
    samples = SAMPLES * (1 if microbatches in (None, 1, 2) else 2)
    w, a, b = numbers(seed, 3, 3), numbers(seed + 1, samples, 3), numbers(seed + 2, samples, 3)
    exact = "entropy" not in name
    mesh = Mesh(replica=ranks[0], shard=ranks[1])
    fp.testing.assert_equivalent(loss, plan, mesh, w, a, b, exact=exact, rtol=None if exact else 1e-12)


@given(samples=st.integers(1, 12), ranks=st.integers(1, 4), outer=st.integers(1, 3), rest=st.integers(1, 3))
def test_where_a_rank_holds_what(samples: int, ranks: int, outer: int, rest: int) -> None:
    """The two maps are each other's inverse, on numbers as on tensors, and every position lies somewhere."""
    parts = DimSplit.of(ranks, max(samples, ranks))
    whole = outer * parts.samples * rest
    extent = parts.local(whole)
    seen = set()
    for rank in parts:
        held = torch.arange(extent)
        positions = parts.whole_position(held, torch.tensor(rank), extent, outer)
        found, inside = parts.held_position(positions, torch.tensor(rank), extent, outer)
        assert inside.all() and torch.equal(found, held)
        assert positions.tolist() == [parts.whole_position(each, rank, extent, outer) for each in range(extent)]
        elsewhere = set(range(-3, whole + 3)) - set(positions.tolist())
        assert not any(parts.held_position(position, rank, extent, outer)[1] for position in elsewhere)
        seen |= set(positions.tolist())
    assert seen == set(range(whole))


@settings(max_examples=6)
@given(blocks=st.sampled_from([(1, 2), (2, 2), (3, 2), (1, 4)]), seed=st.integers(0, 99))
def test_grouped_heads_find_their_keys(blocks: tuple[int, int], seed: int) -> None:
    """More ranks than groups: a rank picks the keys, and the part of a mask, of the query heads that it holds."""
    factor, ranks = blocks

    def loss(w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q = w.reshape(SIZE, 2, 6)
        mask = torch.arange(SIZE * 4).reshape(SIZE, 2, 2) % 3 != 1
        mask = mask | torch.eye(2, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, k * 2, mask, enable_gqa=True).square().sum()

    w, k = numbers(seed, SIZE, SIZE), numbers(seed + 1, 3, 2, 6)
    plan = fp.tensor_parallel("tensor", P((factor, "tensor")))
    fp.testing.assert_equivalent(loss, plan, Mesh(tensor=ranks), w, k, rtol=1e-12)
