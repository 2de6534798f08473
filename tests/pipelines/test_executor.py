"""What the executor holds and when it runs what, measured beside it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.errors import PipelineError
from functional_parallel.ir import info
from functional_parallel.pipelines.execution.rank_executor import RankExecutor
from functional_parallel.schedules import Action
from sharding_specs import Mesh

from ..processes import run_on_processes
from .networks import SYNCHRONOUS, made, pipeline

WIDTH, INNER = 3, 7


class LiveResiduals(TorchDispatchMode):
    """Counts living storages of one shape, by the rank that was running when they were made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.rank = shape, -1
        self.alive: dict[int, list[Any]] = defaultdict(list)
        self.peaks: dict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default and tuple(result.shape) == self.shape:
            self.alive[self.rank].append(weakref.ref(result))
            living = [each for each in self.alive[self.rank] if each() is not None]
            self.alive[self.rank] = living
            self.peaks[self.rank] = max(self.peaks[self.rank], len(living))
        return result


def one_residual_per_stage(params: Any, x: Tensor) -> Tensor:
    for stage, layer in enumerate(params):
        x = fp.stage_boundary(x) if stage else x
        x = torch.tanh(x @ layer["in"]) @ layer["out"]
    return x.sum()


def network(depth: int) -> Any:
    torch.manual_seed(0)
    return [{"in": torch.randn(WIDTH, INNER), "out": torch.randn(INNER, WIDTH)} for _ in range(depth)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_live_residuals_are_those_of_the_schedule(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = made(name, ranks, 2 * ranks)
    tracker = LiveResiduals((2, INNER))
    act = RankExecutor.act

    def watched(self: RankExecutor, action: Action) -> Any:
        tracker.rank = self.rank
        return act(self, action)

    monkeypatch.setattr(RankExecutor, "act", watched)
    step = fp.compile(fp.grad(pipeline(schedule)(one_residual_per_stage)), Mesh(pipe=ranks))
    args = network(schedule.depth), torch.randn(2 * schedule.microbatches, WIDTH)
    step.lower(*args)
    with tracker:
        step(*args)
    assert tuple(tracker.peaks[rank] for rank in range(ranks)) == schedules.peaks(schedule)


PUBLISHED = {
    "gpipe": lambda ranks, microbatches, rank: microbatches,
    "1f1b": lambda ranks, microbatches, rank: min(microbatches, ranks - rank),
    "zb-h1": lambda ranks, microbatches, rank: min(microbatches, ranks),
    "naive": lambda ranks, microbatches, rank: 1,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_schedules_peaks_are_the_published_ones(name: str) -> None:
    schedule = made(name, 4, 8)
    published = [PUBLISHED[name](4, 8, rank) for rank in range(4)]
    assert all(peak <= limit for peak, limit in zip(schedules.peaks(schedule), published, strict=True))
    assert schedules.peaks(schedule)[0] == published[0]


def recorded(rank: int, name: str) -> list[list[Action]]:
    schedule = made(name, 2, 4)
    step = fp.compile(fp.grad(pipeline(schedule)(one_residual_per_stage)), Mesh(pipe=2))
    args = network(schedule.depth), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    program = step.lower(*args)
    program.record()
    step(*args)
    timeline = program.timeline()
    assert timeline.makespan > 0
    assert schedules.timeline_text(timeline, timeline.makespan / 20).startswith("rank 0")
    return [[event.action for event in sorted(row, key=lambda event: event.start)] for row in timeline.events]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_actions_run_in_the_schedules_order(name: str) -> None:
    wanted = [list(row) for row in made(name, 2, 4).actions]
    assert recorded(0, name) == wanted
    for found in run_on_processes(recorded, 2, name):
        assert found == wanted


def test_a_timeline_wants_a_recording() -> None:
    step = fp.compile(fp.grad(pipeline(made("1f1b", 2, 2))(one_residual_per_stage)), Mesh(pipe=2))
    program = step.lower(network(2), torch.randn(4, WIDTH))
    with pytest.raises(PipelineError, match=r"program\.record\(\)"):
        program.timeline()


def test_explain_lists_sends_and_every_microbatch() -> None:
    plan = fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=4))
    step = fp.compile(fp.grad(plan(one_residual_per_stage)), Mesh(pipe=2, data=2))
    program = step.lower(network(2), torch.randn(16, WIDTH))
    counts = program.counts()
    assert counts["send", ("pipe",)] == 2 * 4  # a forward and a backward per microbatch
    # A forward of stage 0 gathers two weights, its backward one. Stage 1 has no use for the sum's value, and the
    # gradient of a sum is the same for every microbatch, so what follows from it alone is gathered for once.
    assert counts["all_gather", ("data",)] == 4 * ((2 + 1) + (1 + 1)) + 1
    assert "sums over the 2 ranks of 'pipe'" in str(program.explain())
    assert "a batch of 16 = 2 per microbatch · 4 microbatches · 2 data ranks" in str(program.explain())
    assert "1f1b: 2 stages" in str(program)


def test_ranks_exchange_scalars_and_no_gradients() -> None:
    """The global norm is a sum over all stages: each sends the squares' sums of its own gradients, once."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for weight in params:
            x = torch.tanh(x @ weight)
        return x.mean()

    params, x = [torch.randn(16, 16) for _ in range(4)], torch.randn(8, 16)
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(pipe=4), fp.pipeline("pipe", microbatches=4), clip=1.0)
    _, metrics = train(train.init(params), x)
    epilogue = train.program.epilogue
    sent = [each for level in epilogue.exchanges for each in level]
    assert {info(each.node).aval.numel for each in sent} == {1}
    assert sum(bool(level) for level in epilogue.exchanges) == 1
    assert all(holders == frozenset(range(4)) for holders in epilogue.output_holders[-2:])  # loss and norm
    plain = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(), fp.accumulate(4), clip=1.0)
    _, wanted = plain(plain.init(params), x)
    assert torch.equal(metrics.grad_norm, wanted.grad_norm)
