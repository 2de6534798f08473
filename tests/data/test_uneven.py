"""Samples spread unevenly over ranks: the value and the gradient are those of one rank that has them all."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import functional_parallel as fp
from functional_parallel.data.uneven import even_batches, pad_batch
from sharding_specs import Mesh, P

ROWS = 4
SPLIT = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(-3, 4, shape, generator=generator).double() for name, shape in SHAPES.items()}


SHAPES = {"w": (3, 4), "v": (4, 2)}


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(torch.randint(-3, 4, (count, size), generator=generator).double() for size in (3, 2))  # type: ignore[return-value]


def each(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """A loss per sample, closed on the integers."""
    return (((x @ params["w"]).relu() @ params["v"]) * y).sum(1)


def mean(params: dict[str, Tensor], x: Tensor, y: Tensor, present: Tensor) -> Tensor:
    return (each(params, x, y) * present).sum() / present.sum()


def masked(params: dict[str, Tensor], x: Tensor, y: Tensor, present: Tensor) -> Tensor:
    """The same of a loss that leaves targets out by their number."""
    scores = (x @ params["w"]).relu() @ params["v"]
    return F.cross_entropy(scores, y[:, 0].clamp(0, 1).long().masked_fill(~present, -100))


def mean_of_means(params: dict[str, Tensor], x: Tensor, y: Tensor, present: Tensor) -> Tensor:
    found = [mean(params, *part) for part in zip(*(leaf.split(ROWS) for leaf in (x, y, present)), strict=True)]
    return torch.stack(found).mean()


def spread(sizes: list[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Samples, and the global batch of ranks that have so many of them each, filled up."""
    whole = samples(sum(sizes))
    parts = list(zip(*(leaf.split(sizes) for leaf in whole), strict=True))
    padded = [pad_batch(part, ROWS, like=whole) for part in parts]
    x, y = (torch.cat(leaves) for leaves in zip(*(batch for batch, _ in padded), strict=True))
    return whole, (x, y, torch.cat([present for _, present in padded]))


@st.composite
def plans(draw: st.DrawFn, ranks: int) -> tuple[Any, Mesh]:
    tensor = draw(st.sampled_from([1, 2]))
    layout = draw(st.sampled_from(["dims", "flat"]))
    data = draw(st.sampled_from([fp.data_parallel("data"), fp.zero(2, "data", layout=layout), fp.zero(3, "data")]))
    more = draw(st.sampled_from([(), (fp.accumulate(2),), (fp.accumulate(4),)]))
    return fp.chain(SPLIT, data, *more), Mesh(data=ranks, tensor=tensor)


@settings(max_examples=16)
@given(st.data())
def test_the_gradient_is_that_of_one_rank_with_all_samples(data: st.DataObject) -> None:
    """To the bit: sums of integers, and counts that are powers of two."""
    count, ranks = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([2, 4]))
    sizes, left = [], count
    for rank in range(ranks):
        most, least = min(ROWS, left), max(0, left - ROWS * (ranks - rank - 1))
        sizes.append(data.draw(st.integers(least, most)))
        left -= sizes[-1]
    plan, mesh = data.draw(plans(ranks))
    whole, batch = spread(sizes)
    want = fp.grad_and_value(lambda params: each(params, *whole).sum() / count)(parameters())
    train = fp.train_step(mean, fp.optim.sgd(1.0), mesh, plan)
    state, metrics = train(train.init(parameters()), *batch)
    new = optree.tree_map(torch.sub, parameters(), want[0])
    assert torch.equal(metrics.loss, want[1])
    assert all(torch.equal(a, b) for a, b in zip(*map(optree.tree_leaves, (train.params(state), new)), strict=True))


@pytest.mark.parametrize("f", [mean, masked])
@pytest.mark.parametrize("sizes", [[4, 3], [1, 4], [0, 3], [4, 0]], ids=str)
def test_means_over_any_number(f: Any, sizes: list[int]) -> None:
    whole, batch = spread(sizes)
    gradients, value = fp.compile(fp.grad_and_value(fp.data_parallel("data")(f)), Mesh(data=2))(parameters(), *batch)
    want, alone = fp.grad_and_value(f)(parameters(), *whole, torch.ones(sum(sizes), dtype=torch.bool))
    for a, b in zip(optree.tree_leaves((gradients, value)), optree.tree_leaves((want, alone)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_mean_of_the_ranks_means_is_another_number() -> None:
    """So the tests before this one can fail."""
    _, batch = spread([4, 1])
    assert (mean_of_means(parameters(), *batch) - mean(parameters(), *batch)).abs() > 1e-3


def test_a_samplers_uneven_tail() -> None:
    """Every sample of the epoch counts once, the last ones on ranks that have fewer, or none."""
    mesh, data = Mesh(data=4), torch.arange(9 * 3.0).reshape(9, 3)
    sampler = fp.Sampler(len(data), 8, mesh)
    blocks = [[block for block in sampler.epoch(0, rank) if block] for rank in mesh.ranks]
    own = [list(DataLoader(data, batch_sampler=each)) for each in blocks]  # type: ignore[arg-type]
    assert [len(batches) for batches in own] == [2, 1, 1, 1]
    rows = sampler.batch // sampler.ranks
    step = fp.compile(fp.data_parallel("data")(lambda w, x, present: ((x @ w) * present).sum() / present.sum()), mesh)
    for number in range(2):
        parts = [batches[number] if number < len(batches) else data[:0] for batches in own]
        padded = [pad_batch(part, rows, like=data) for part in parts]
        x, present = (torch.cat(leaves) for leaves in zip(*padded, strict=True))
        assert step(torch.ones(3), x, present) == torch.cat(parts).sum(1).mean()


# -----------------------------------------------------------------------------
# Filling up
# -----------------------------------------------------------------------------


@given(count=st.integers(0, 5), more=st.integers(0, 3))
def test_what_fills_up_is_a_sample(count: int, more: int) -> None:
    batch = {
        "x": torch.arange(2 * count).reshape(count, 2),
        "deep": [torch.ones(count)],
        "scale": torch.ones(()),
        "n": 3,
    }
    other = {"x": torch.tensor([[7, 8]]), "deep": [torch.ones(1)], "scale": torch.ones(()), "n": 3}
    filled, present = pad_batch(batch, count + more, like=other)
    assert present.tolist() == [True] * count + [False] * more
    assert torch.equal(filled["x"][present], batch["x"]) and filled["deep"][0].shape == (count + more,)
    assert filled["x"][count:].tolist() == [[0, 1] if count else [7, 8]] * more
    assert filled["n"] == 3 and filled["scale"].shape == ()


def test_batches_of_one_process_are_filled_up_too() -> None:
    found = list(even_batches(torch.arange(10).split([4, 0, 3, 3]), 4, Mesh(data=2)))
    assert [batch.tolist() for batch, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 4], [7, 8, 9, 7]]
    assert [present.sum().item() for _, present in found] == [4, 3, 3]
    assert list(even_batches([], 4, Mesh(data=2))) == []


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.ones(3)], r"a batch has 3 rows, more than the 2 of rows=2: give a larger rows="),
        ([{"x": torch.ones(2), "y": torch.ones(1)}], r"samples in dim 0, equally many: x has 2, y has 1"),
        ([{"n": 3}], r"equally many: there is no tensor"),
    ],
)
def test_batches_that_cannot_be_filled_up(batches: list[Any], message: str) -> None:
    with pytest.raises(fp.UnevenBatchError, match=message):
        list(fp.even_batches(batches, 2, Mesh(data=2)))
    with pytest.raises(fp.UnevenBatchError, match=message):
        fp.pad_batch(batches[0], 2)


def test_nothing_to_copy() -> None:
    for like in (None, torch.ones(0, 2)):
        with pytest.raises(fp.UnevenBatchError, match=r"without rows has none to copy: give pad_batch\(like=…\)"):
            fp.pad_batch(torch.ones(0, 2), 2, like=like)


def test_an_error_of_the_loader_is_the_loaders() -> None:
    def broken() -> Any:
        yield torch.ones(2)
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        list(fp.even_batches(broken(), 2, Mesh(data=2)))
