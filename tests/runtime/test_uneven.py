"""Real ranks with unequal numbers of samples and of batches; and what they are told without `fp.even_batches`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from sharding_specs import Mesh
from tests.processes import run_on_processes

MESH, ROWS = Mesh(data=2), 4
ZERO, ONE = "rank 0 (data=0)", "rank 1 (data=1)"
PLANS = {
    "data parallel": fp.data_parallel("data"),
    "zero 2, flat": fp.zero(2, "data", layout="flat"),
    "zero 3": fp.zero(3, "data"),
}
SIZES = {  # per rank, its batches' numbers of samples; together powers of two, so that means are exact
    "a short last batch": ([4, 3], [4, 1]),
    "short throughout": ([3, 1], [1, 1]),
    "fewer batches": ([4, 4, 2], [4]),
    "none at all": ([4, 2], []),
}


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).double()  # noqa: E731
    return {"w": draw(3, 5), "v": draw(5)}


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, present: Tensor) -> Tensor:
    each = ((x @ params["w"]).relu() @ params["v"]) * y
    return (each * present).sum() / present.sum()


def batches_of(sizes: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).double()  # noqa: E731
    return [(draw(size, 3), draw(size)) for size in sizes]


# -----------------------------------------------------------------------------
# What the ranks run
# -----------------------------------------------------------------------------


def on_uneven_ranks(rank: int) -> dict[str, Any]:
    return {
        f"{name}, {plan}": trained_unevenly(batches_of(sizes[rank], rank), PLANS[plan])
        for (name, sizes), plan in itertools.product(SIZES.items(), PLANS)
    }


def trained_unevenly(own: list[tuple[Tensor, Tensor]], plan: Any) -> dict[str, Any]:
    train = fp.train_step(loss, fp.optim.sgd(0.25), MESH, plan, batch="own", reduction="ordered")
    state, losses = train.init(parameters()), []
    for batch, present in fp.even_batches(own, ROWS, MESH):
        state, metrics = train(state, *batch, present)
        losses.append(metrics.loss)
    return {"params": train.params(state), "losses": losses}


def on_ranks_out_of_step(rank: int) -> dict[str, Any]:
    use_runtime(ProcessRuntime(MESH, timeout=20))
    return {
        "shapes": told(lambda: take_steps([(4, 3), (4 - rank, 3)])),
        "steps": told(lambda: take_steps([(4, 3)] * (3 - rank))),
        "leaving early": told(lambda: leave_at(3 - rank)),
        "too many rows": told(lambda: list(fp.even_batches(torch.ones(6).split(2 + rank), 2, MESH))),
        "a broken loader": told(lambda: list(fp.even_batches(broken() if rank else torch.ones(6).split(2), 2, MESH))),
        "other samples": told(lambda: list(fp.even_batches([{"x": torch.ones(2, 3 + rank), "n": 1}], 2, MESH))),
        "other rows": told(lambda: list(fp.even_batches([torch.ones(2)], 2 + rank, MESH))),
        "afterwards": trained_unevenly(batches_of(SIZES["fewer batches"][rank], rank), PLANS["zero 3"]),
    }


def on_a_rank_that_is_left(rank: int) -> tuple[str, str, float]:
    """The other one has no more batches, and ends."""
    use_runtime(ProcessRuntime(MESH, timeout=20))
    return told(lambda: take_steps([(4, 3)] * 3, end=2 if rank else None))


def take_steps(shapes: list[tuple[int, int]], end: int | None = None) -> None:
    train = fp.train_step(lambda w, x: (x @ w).mean(), fp.optim.sgd(0.1), MESH, fp.data_parallel("data"), batch="own")
    state = train.init(torch.ones(3))
    for number, shape in enumerate(shapes):
        if number == end:
            os._exit(17)
        state, _ = train(state, torch.ones(shape))
    train.params(state)


def leave_at(last: int) -> None:
    train = fp.train_step(lambda w, x: (x * w).mean(), fp.optim.sgd(0.1), MESH, fp.data_parallel("data"), batch="own")
    state = train.init(torch.ones(()))
    for number, (x, _) in enumerate(fp.even_batches(torch.ones(10).split(2), 2, MESH)):
        if number == last:
            break
        state, _ = train(state, x)
    train.params(state)


def broken() -> Iterator[Tensor]:
    yield torch.ones(2)
    raise OSError("no such file")


def told(run: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


# -----------------------------------------------------------------------------
# What must hold
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return run_on_processes(on_uneven_ranks, 2, timeout=120)


@pytest.fixture(scope="module")
def out_of_step() -> list[dict[str, Any]]:
    return run_on_processes(on_ranks_out_of_step, 2, timeout=120)


def alone(name: str) -> dict[str, Any]:
    """One rank, whose every batch is all that the ranks have at that time."""
    train = fp.train_step(loss, fp.optim.sgd(0.25), Mesh(data=1))
    state, losses = train.init(parameters()), []
    for parts in itertools.zip_longest(*(batches_of(sizes, rank) for rank, sizes in enumerate(SIZES[name]))):
        x, y = (torch.cat(leaves) for leaves in zip(*(part for part in parts if part is not None), strict=True))
        state, metrics = train(state, x, y, torch.ones(len(x), dtype=torch.bool))
        losses.append(metrics.loss)
    return {"params": train.params(state), "losses": losses}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SIZES)
def test_training_is_that_of_one_rank_with_all_samples(real: list[dict[str, Any]], name: str, plan: str) -> None:
    """To the bit."""
    want = alone(name)
    assert len(want["losses"]) == max(map(len, SIZES[name]))
    for result in real:
        found = result[f"{name}, {plan}"]
        assert optree.tree_structure(found) == optree.tree_structure(want)
        assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(want)))


@pytest.mark.parametrize(("what", "ranks"), [
    ("shapes", [f"{ZERO} takes step 1 on 0: float32[4, 3]; {ONE} takes step 1 on 0: float32[3, 3]. With batch='own'"]),
    ("steps", [f"{ZERO} takes step 2 on 0: float32[4, 3]; {ONE} reads the state of step 2. With batch='own'"]),
    ("leaving early", [f"{ZERO} takes step 2 on 0: float32[2]; {ONE} reads the state of step 2."]),
    ("other rows", [f"{ZERO} begins fp.even_batches(rows=2); {ONE} begins fp.even_batches(rows=3). Every rank must"]),
])  # fmt: skip
def test_ranks_out_of_step_are_told_at_once(out_of_step: list[dict[str, Any]], what: str, ranks: list[str]) -> None:
    """Also ranks whose program has run before, and who would have gone into its collectives alone."""
    for result in out_of_step:
        kind, message, seconds = result[what]
        assert kind == "CallMismatchError" and seconds < 10
        assert all(text in message for text in ranks), message
    if what in ("shapes", "steps"):
        assert "fp.even_batches(batches, rows, mesh)" in out_of_step[0][what][1]


def test_a_rank_that_ends_before_the_others() -> None:
    (kind, message, seconds), code = run_on_processes(on_a_rank_that_is_left, 2, timeout=60, deaths=True)
    assert code == 17 and kind == "CollectiveError" and seconds < 25
    assert message.startswith("rank 0 (data=0): the agreement with all ranks, where this rank takes step 2 on 0: ")
    assert "float32[4, 3], failed after" in message and " in step 2 (call " in message
    assert "rank 1 (data=1) died. With" in message and "timeout" not in message
    assert "fp.even_batches(batches, rows, mesh)" in message


@pytest.mark.parametrize(("what", "own", "others"), [
    ("too many rows", ("UnevenBatchError", "a batch has 3 rows, more than the 2"), f"{ONE}: UnevenBatchError('a batch"),
    ("a broken loader", ("OSError", "no such file"), "end with an error, so all stop here. rank 1 (data=1): OSError("),
])  # fmt: skip
def test_a_rank_in_trouble_tells_the_others(out_of_step: Any, what: str, own: tuple[str, str], others: str) -> None:
    kind, message, _ = out_of_step[1][what]
    assert kind == own[0] and own[1] in message
    kind, message, seconds = out_of_step[0][what]
    assert kind == "UnevenBatchError" and others in message and seconds < 10


def test_samples_of_different_ranks_are_compared(out_of_step: list[dict[str, Any]]) -> None:
    for result in out_of_step:
        kind, message, _ = result["other samples"]
        assert kind == "UnevenBatchError"
        assert message == f"ranks have different samples: {ZERO} has n: 1, x: float32[3]; {ONE} has n: 1, x: float32[4]"


def test_ranks_go_on_after_that(out_of_step: list[dict[str, Any]]) -> None:
    want = alone("fewer batches")
    for result in out_of_step:
        found = optree.tree_leaves(result["afterwards"])
        assert all(map(torch.equal, found, optree.tree_leaves(want)))
