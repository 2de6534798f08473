"""A pipelined step writes the new state into the memory of the old one, and sums gradients where they lie."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.pipelines.execution.rank_executor import RankExecutor
from functional_parallel.runtime import storages
from functional_parallel.schedules import Action
from sharding_specs import Mesh, split

from ..processes import run_on_processes

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

CONFIG = gpt.Config(layers=2, embed=16, heads=2, time=8, tied=True)
TOKENS = torch.randint(0, 256, (16, 9), generator=torch.Generator().manual_seed(0))

CASES: dict[str, tuple[Any, Mesh, dict[str, Any]]] = {
    "plain": (fp.chain(), Mesh(pipe=2), {}),
    "clip": (fp.chain(), Mesh(pipe=4), {"clip": 1.0}),
    "zero 0": (fp.zero(0, "data"), Mesh(pipe=2, data=2), {}),
    "zero 1": (fp.zero(1, "data"), Mesh(pipe=2, data=2), {"clip": 1.0}),
    "zero 3": (fp.zero(3, "data"), Mesh(pipe=2, data=2), {}),
}


@cache
def build(case: str, schedule: str = "1f1b", donate: bool = True) -> tuple[Any, Any]:
    inner, mesh, options = CASES[case]
    params, _ = split(gpt.init(CONFIG, 0))
    plan = fp.chain(inner, fp.pipeline("pipe", schedule=schedule, microbatches=4))
    loss = partial(gpt.loss, config=CONFIG)
    return fp.train_step(loss, fp.optim.adamw(1e-2), mesh, plan, donate=donate, **options), params


def places(state: fp.TrainState) -> list[dict[int, set[int]]]:
    return [{rank: storages(part) for rank, part in handle.parts.items()} for handle in state.handles]


def written(train: Any) -> list[bool]:
    """Of parameters and optimizer state, which are tensors that updates write: all but counts."""
    return [info(node).aval.numel > 1 for node in train.program.inputs if info(node).is_state]


FOLDED = [case for case in CASES if case != "clip"]  # whose two layers are not eight stages


@pytest.mark.parametrize(("case", "schedule"), [*((c, "1f1b") for c in CASES), *((c, "zb-v") for c in FOLDED)])
@pytest.mark.every(3)
def test_a_step_writes_where_the_state_lies_and_keeps_its_bits(case: str, schedule: str) -> None:
    train, params = build(case, schedule)
    kept, _ = build(case, schedule, donate=False)
    before = optree.tree_map(torch.clone, params)
    state, other = train.init(params), kept.init(params)
    for number in range(2):
        old = None if number == 0 else places(state)
        state, metrics = train(state, TOKENS)
        other, wanted = kept(other, TOKENS)
        assert torch.equal(metrics.loss, wanted.loss)
        if old is not None:
            pairs = list(zip(old, places(state), written(train), strict=True))
            assert sum(big for *_, big in pairs) > 50
            assert all(a == b for a, b, big in pairs if big)
    found, expected = (optree.tree_leaves(each.whole(s)) for each, s in ((train, state), (kept, other)))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, optree.tree_leaves(before), optree.tree_leaves(params)))  # the caller's own


def narrow(params: Any, x: Tensor) -> Tensor:
    """Parameters are most of what a rank holds."""
    for w in params:
        x = torch.tanh(x @ w)
    return x.sum()


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_no_second_copy(case: str) -> None:
    inner, mesh, options = CASES[case]
    plan, held = fp.chain(inner, fp.pipeline("pipe", microbatches=4)), {}
    for donate in (True, False):
        train = fp.train_step(narrow, fp.optim.adamw(1e-2), mesh, plan, donate=donate, **options)
        program = train.lower(train.init([torch.zeros(32, 32) for _ in range(8)]), torch.zeros(8, 32))
        held[donate] = program.memory().ranks
    for number, (one, two) in enumerate(zip(held[True], held[False], strict=True)):
        carried = [node for node in program.inputs if info(node).is_state and number in program.holders(node)]
        bytes_carried = sum(info(node).aval.nbytes for node in carried)
        assert one.alive["parameters"] + one.alive["optimizer state"] <= bytes_carried + 4  # and a new count
        assert two.alive["parameters"] + two.alive["optimizer state"] > 1.9 * bytes_carried
        assert one.peak < two.peak


def test_a_used_up_state_says_so() -> None:
    train, params = build("zero 1")
    state = train.init(params)
    copy = train.copy(state)
    after, metrics = train(state, TOKENS)
    with pytest.raises(fp.DonatedStateError, match=r"of step 0, was given to a step"):
        train(state, TOKENS)
    whole = train.params(after)
    said = optree.tree_map(torch.clone, whole)
    again, repeated = train(copy, TOKENS)
    assert torch.equal(metrics.loss, repeated.loss)
    assert all(map(torch.equal, optree.tree_leaves(train.params(again)), optree.tree_leaves(whole)))
    train(after, TOKENS)
    assert all(map(torch.equal, optree.tree_leaves(said), optree.tree_leaves(whole)))  # not written over


def test_a_copy_that_no_rank_holds_is_dropped_in_the_first_step() -> None:
    """A state begins whole on every rank of the pipeline, and from then on lies where its stages are."""
    train, params = build("plain")
    state = train.init(params)
    handles = state.handles
    assert all(len(handle.parts) == 2 for handle in handles)
    train(state, TOKENS)
    parts = [len(handle.parts) for handle in handles]
    assert parts.count(1) > 50 and 2 in parts  # the tied embedding, and counts


def test_parameters_that_a_step_reports_are_not_written_over() -> None:
    def loss(params: Any, x: Tensor) -> Any:
        h = x
        for w in params:
            h = torch.tanh(h @ w)
        return h.sum(), {"first": params[0], "row": params[-1][0]}

    for clip in (None, 1.0):
        params = [torch.randn(4, 4) for _ in range(4)]
        plan = fp.pipeline("pipe", microbatches=2)
        train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(pipe=2), plan, has_aux=True, clip=clip)
        state, metrics = train(train.init(params), torch.randn(4, 4))
        assert torch.equal(metrics.aux["first"], params[0]) and torch.equal(metrics.aux["row"], params[-1][0])
        reported = optree.tree_map(torch.clone, metrics.aux)
        train(state, torch.randn(4, 4))
        assert all(map(torch.equal, optree.tree_leaves(reported), optree.tree_leaves(metrics.aux)))


def on_two(rank: int, zero: int | None) -> tuple[bool, list[Tensor]]:
    """Whether a second step's state lies where the first one's did; and what it is."""
    inner = fp.chain() if zero is None else fp.zero(zero, "data")
    mesh = Mesh(pipe=2) if zero is None else Mesh(pipe=2, data=2)
    params, _ = split(gpt.init(CONFIG, 0))
    plan = fp.chain(inner, fp.pipeline("pipe", microbatches=4))
    train = fp.train_step(
        partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-2), mesh, plan, clip=1.0, reduction="ordered"
    )
    state, _ = train(train.init(params), TOKENS)
    before = places(state)
    state, _ = train(state, TOKENS)
    same = [a == b for a, b, big in zip(before, places(state), written(train), strict=True) if big]
    return all(same) and len(same) > 50, optree.tree_leaves(train.whole(state))


def test_on_two_processes() -> None:
    _, wanted = on_two(0, None)
    for same, found in run_on_processes(on_two, 2, None):
        assert same and all(map(torch.equal, found, wanted))


def test_on_four_processes_with_zero_1() -> None:
    _, wanted = on_two(0, 1)
    for same, found in run_on_processes(on_two, 4, 1):
        assert same and all(map(torch.equal, found, wanted))


# -----------------------------------------------------------------------------
# Sums over microbatches
# -----------------------------------------------------------------------------


def sums_of(monkeypatch: pytest.MonkeyPatch, f: Any, params: Any, x: Tensor, schedule: str = "1f1b") -> Any:
    """A gradient, with the storages in which each sum lay, and how many sums there were."""
    found: dict[Any, set[int]] = {}
    act = RankExecutor.act

    def watched(self: RankExecutor, action: Action) -> Any:
        sent = act(self, action)
        for chain, totals in self.totals.items():
            for total, value in totals.items():
                found.setdefault((self.rank, chain, total), set()).update(storages(value))
        return sent

    with monkeypatch.context() as patch:
        patch.setattr(RankExecutor, "act", watched)
        step = fp.compile(fp.grad(fp.pipeline("pipe", schedule=schedule, microbatches=4)(f)), Mesh(pipe=2))
        return step(params, x), list(found.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "gpipe"])
def test_gradients_are_added_up_where_they_lie(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, x = [torch.randint(-2, 3, (4, 4)).double() for _ in range(4)], torch.randint(-2, 3, (16, 4)).double()

    def f(params: Any, x: Tensor) -> Tensor:
        for w in params:
            x = (x @ w).clamp(-4, 4)
        return (x**2).sum()

    grads, places = sums_of(monkeypatch, f, params, x, schedule)
    assert [len(each) for each in places] == [1] * 4
    assert all(map(torch.equal, grads, torch.func.grad(f)(params, x)))


def test_sums_that_share_memory_are_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient for two parameters; one that is expanded; one that follows from what is sent."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    params = {"w": draw(4, 4), "v": draw(4, 4), "a": draw(4, 4), "b": draw(4, 4), "c": draw(4, 4), "d": draw(4, 4)}

    def f(params: Any, x: Tensor) -> Tensor:
        h = (x @ params["w"] + params["a"] + params["b"]).clamp(-4, 4)
        h = fp.stage_boundary(h + params["c"])  # its gradient is what the stage behind sends
        return ((h @ params["v"]).clamp(-4, 4) * params["d"].sum(0)).sum()

    x = draw(16, 4, 4)
    wanted = torch.func.grad(f)(params, x)
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        grads, _ = sums_of(monkeypatch, f, params, x, schedule)
        assert all(torch.equal(grads[name], wanted[name]) for name in params), schedule


def test_adding_in_place_needs_less_and_can_be_switched_off() -> None:
    plan = fp.pipeline("pipe", microbatches=4)
    peaks = []
    for without in ((), ("in place",)):
        train = fp.train_step(narrow, fp.optim.sgd(1e-2), Mesh(pipe=2), plan, without=without)
        program = train.lower(train.init([torch.zeros(32, 32) for _ in range(8)]), torch.zeros(8, 32))
        assert ("in place" in program.passes) is not bool(without)
        peaks.append(program.memory().peak)
    assert peaks[0] < peaks[1]
