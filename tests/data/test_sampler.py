"""Every sample is read once an epoch, whatever the mesh; and the same samples make the same global batches on any."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import functional_parallel as fp
from functional_parallel.data.sampler import Position, Sampler
from sharding_specs import Mesh, MeshError

MESHES = [
    (Mesh(data=1), "data"),
    (Mesh(data=3), "data"),
    (Mesh(data=2, tensor=2), "data"),
    (Mesh(tensor=2, data=2), ("data",)),
    (Mesh(pod=2, tensor=2, data=2), ("pod", "data")),
    (Mesh(pod=2, tensor=2, data=2), ("data", "pod")),
]


@st.composite
def samplers(draw: st.DrawFn, tail: str | None = None) -> Sampler:
    mesh, axis = draw(st.sampled_from(MESHES))
    batch = mesh.axis_size(axis) * draw(st.integers(1, 4))
    tail = tail or draw(st.sampled_from(["uneven", "drop", "repeat"]))
    length = draw(st.integers(batch if tail == "drop" else 1, 40))
    return Sampler(length, batch, mesh, axis, tail, draw(st.booleans()), draw(st.integers(-5, 5)))


def blocks(sampler: Sampler, epoch: int) -> list[list[list[int]]]:
    """Per rank along the axes, in their order: its batches; ranks along other axes must have the same."""
    found: dict[int, list[list[int]]] = {}
    for rank in sampler.mesh.ranks:
        index = sampler.mesh.axis_index(rank, sampler.axis)
        own = sampler.epoch(epoch, rank)
        assert found.setdefault(index, own) == own
    return [found[index] for index in range(sampler.ranks)]


def global_batches(sampler: Sampler, epoch: int) -> list[list[int]]:
    return [list(itertools.chain(*parts)) for parts in zip(*blocks(sampler, epoch), strict=True)]


@settings(max_examples=200)
@given(samplers(), st.integers(0, 3))
def test_the_blocks_of_a_batch_are_its_part_of_the_order(sampler: Sampler, epoch: int) -> None:
    order = sampler.order(epoch).tolist()
    read = list(itertools.chain(*global_batches(sampler, epoch)))
    assert sorted(order) == list(range(sampler.length))
    if sampler.tail == "uneven":
        assert read == order
    elif sampler.tail == "drop":
        assert read == order[: len(order) // sampler.batch * sampler.batch]
    else:
        assert read == list(itertools.islice(itertools.cycle(order), sampler.batches * sampler.batch))


@settings(max_examples=100)
@given(samplers(), st.integers(0, 3))
def test_ranks_read_equally_much(sampler: Sampler, epoch: int) -> None:
    sizes = [[len(batch) for batch in own] for own in blocks(sampler, epoch)]
    assert all(len(own) == sampler.batches for own in sizes), "as many batches, so no rank waits for one that has ended"
    assert all(size == sampler.batch // sampler.ranks for own in sizes for size in own[:-1])
    last = [own[-1] for own in sizes]
    assert last == sorted(last, reverse=True) and last[0] - last[-1] <= (1 if sampler.tail == "uneven" else 0)


@settings(max_examples=100)
@given(samplers(), st.data())
def test_a_run_goes_on_from_any_position(sampler: Sampler, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(list(sampler.mesh.ranks)))
    whole = list(itertools.islice(sampler.run(rank), 3 * sampler.batches))
    assert [batch for _, batch in whole] == [batch for epoch in range(3) for batch in sampler.epoch(epoch, rank)]
    stop = data.draw(st.integers(1, len(whole) - 1))
    resumed = itertools.islice(sampler.run(rank, Position(*tuple(whole[stop - 1][0]))), len(whole) - stop)
    assert list(resumed) == whole[stop:]


@settings(max_examples=50)
@given(samplers())
def test_another_mesh_reads_the_same_global_batches(sampler: Sampler) -> None:
    alone = Sampler(sampler.length, sampler.batch, Mesh(data=1), "data", sampler.tail, sampler.shuffle, sampler.seed)
    assert global_batches(sampler, 1) == global_batches(alone, 1)


@pytest.mark.parametrize("tail", ["drop", "repeat"])
@pytest.mark.parametrize("length", [8, 9, 11])
def test_one_sample_per_rank_is_torchs_sampler(length: int, tail: str) -> None:
    for rank in range(4):
        theirs = DistributedSampler(range(length), 4, rank, shuffle=False, drop_last=tail == "drop")  # type: ignore[arg-type]
        ours = Sampler(length, 4, Mesh(data=4), tail=tail, shuffle=False).epoch(0, rank)
        assert list(itertools.chain(*ours)) == list(theirs)


def test_orders_differ_by_epoch_and_seed_and_favour_no_sample() -> None:
    mesh = Mesh(data=1)
    orders = {tuple(Sampler(50, 5, mesh, seed=seed).order(epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    first = Counter(Sampler(4, 1, mesh).order(epoch)[0].item() for epoch in range(2000))
    assert all(abs(count - 500) < 5 * 500**0.5 for count in first.values()) and len(first) == 4


def test_an_order_is_the_same_on_every_machine() -> None:
    """Integer arithmetic alone, here again in Python: a checkpoint's position must mean the same elsewhere."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def fold(key: int, number: int) -> int:
        return mix((key * golden + mix((number + golden) & mask)) & mask)

    def signed(z: int) -> int:
        return z - (1 << 64) if z >> 63 else z

    key = fold(mix((3 + golden) & mask), 2)
    order = sorted(range(100), key=lambda sample: signed(fold(key, sample)))
    assert Sampler(100, 1, Mesh(data=1), seed=3).order(2).tolist() == order


def test_it_drives_a_loader_and_a_training_step() -> None:
    """Own parts, put together, are the global batch: the same losses, bit for bit."""
    data = torch.randint(-8, 8, (22, 4), generator=torch.Generator().manual_seed(0)).double()
    mesh = Mesh(data=2)
    sampler = Sampler(len(data), 8, mesh, tail="repeat")
    loaders = [DataLoader(data, batch_sampler=sampler.epoch(0, rank)) for rank in mesh.ranks]  # type: ignore[arg-type]
    whole = DataLoader(data, batch_sampler=Sampler(len(data), 8, Mesh(data=1), tail="repeat").epoch(0, 0))  # type: ignore[arg-type]
    train = fp.train_step(lambda w, x: ((x @ w) ** 2).mean(), fp.optim.sgd(0.0), mesh, fp.data_parallel("data"))
    state = train.init(torch.ones(4, dtype=torch.float64))
    for batch, *parts in zip(whole, *loaders, strict=True):
        assert torch.equal(torch.cat(parts), batch)
        state, metrics = train(state, torch.cat(parts))
        assert metrics.loss == ((batch.sum(1)) ** 2).mean()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 6}, "the 4 ranks along 'data' do not divide a global batch of 6; take 4 or 8"),
        ({"batch": 2}, "take 4$"),
        ({"tail": "pad"}, "one of 'uneven', 'drop', 'repeat'"),
        ({"length": 0}, "there must be a sample"),
        ({"length": 3, "tail": "drop"}, "3 samples do not fill one batch of 4"),
    ],
)
def test_what_cannot_be_read_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampler(**{"length": 10, "batch": 4, "mesh": Mesh(data=4), **options})  # type: ignore[arg-type]


def test_an_axis_that_the_mesh_has_not_is_refused() -> None:
    with pytest.raises(MeshError, match="no axis 'batch'"):
        Sampler(10, 4, Mesh(data=4), "batch")


def test_a_position_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    sampler = Sampler(10, 4, Mesh(data=2))
    position, _ = next(sampler.run(0))
    torch.save({"position": position}, tmp_path / "run.pt")
    again = torch.load(tmp_path / "run.pt")["position"]
    assert next(sampler.run(0, again)) == list(itertools.islice(sampler.run(0), 2))[1]


@pytest.mark.parametrize("start", [(0, 3), (0, -1), (-1, 0)])
def test_a_position_of_another_sampler(start: tuple[int, int]) -> None:
    """Of one with smaller batches: the rest of the epoch was left out."""
    with pytest.raises(ValueError, match=r"an epoch of 10 samples in batches of 4 has batches 0 to 2"):
        Sampler(10, 4, Mesh(data=2)).run(0, Position(*start))
