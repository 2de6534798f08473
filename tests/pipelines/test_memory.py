"""Law 5 for pipelines: what `memory` says of each rank is what the executor holds there, to the byte."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.ir import info
from functional_parallel.pipelines import PipelineProgram, slices_of
from functional_parallel.pipelines.execution.async_executor import AsyncRankExecutor
from functional_parallel.pipelines.execution.memory_simulator import SimulatedStorage
from functional_parallel.pipelines.execution.rank_executor import RankExecutor
from functional_parallel.program import Program
from functional_parallel.runtime import PipelineRuntime, ProcessRuntime, use_runtime
from functional_parallel.schedules import Action
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh, split

from ..processes import run_on_processes
from ..program.test_memory import filled, flat_function
from .networks import SYNCHRONOUS, made, pipeline

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

OPTIMIZERS = {"sgd": fp.optim.sgd(0.1), "momentum": fp.optim.sgd(0.1, momentum=0.9), "adamw": fp.optim.adamw(1e-2)}


# -----------------------------------------------------------------------------
# One rank alone, with tensors
# -----------------------------------------------------------------------------


class OneRank(PipelineRuntime):
    """The executor on one rank: collectives and messages stand in as allocations of what they would bring."""

    def __init__(self, program: PipelineProgram, rank: int) -> None:
        self.base, self.communicator, self.axis, self.rank = (
            self,
            SimpleNamespace(reduction="ordered"),
            program.axis,
            rank,
        )
        self.program, self.ranks, self.mesh, self.mail = program, (rank,), program.mesh, self
        self.functions: dict[Program, Any] = {}
        self.sent: Any = None
        self.under_way: dict[Any, list[Tensor]] = {}

    def peak(self) -> int:
        """The most bytes of live storages in a step."""
        program, rank = self.program, self.rank
        constants = [
            part.traced.constants[node.target]
            for part in program.programs_of_rank(rank)
            for node in part.traced.graph.nodes
            if node.op == "get_attr"
        ]
        inputs = {node: self._input(node) for node in program.inputs if rank in program.holders(node)}
        with torch.no_grad(), self.tracking(inputs, constants) as tracker:
            if program.schedule.versions is not None:
                stream = AsyncRankExecutor(program, rank, self.run, inputs, slices_of(program, inputs, self._chunks))
                del inputs
                self._executor(program).run_schedule(stream)
            else:
                worker = RankExecutor(program, rank, self.run, inputs, ordered=True)
                del inputs
                worker.begin()
                self._executor(program).run_schedule(worker)
                self._executor(program).run_epilogue(worker)
        return tracker.peak

    zeros = staticmethod(torch.zeros)

    def tracking(self, inputs: Mapping[torch.fx.Node, Tensor], constants: list[Tensor]) -> Any:
        return tracked((list(inputs.values()), constants))

    def _input(self, node: torch.fx.Node) -> Tensor:
        x = filled(info(node).val)
        if node not in self.program.cut_dims:
            return x
        count = self.program.schedule.microbatches
        return torch.cat([x] * count, self.program.cut_dims[node])

    def run(self, program: Any, values: Any) -> Any:
        if program not in self.functions:
            self.functions[program] = flat_function(program, self.zeros)
        return self.functions[program](values)

    def send(self, step: Any, values: list[Tensor]) -> None:
        self.sent = values

    def expect(self, step: Any, avals: Sequence[Any]) -> None:
        self.under_way[step.action] = [torch.zeros(aval.shape, dtype=aval.dtype) for aval in avals]

    def take(self, action: Action) -> list[Tensor] | None:  # type: ignore[override]
        return self.under_way.pop(action, None)

    def finish(self) -> None:
        self.sent = None

    def exchange(self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> Any:  # type: ignore[override]
        joined = [torch.cat([value.reshape(-1) for value in values]) for values in outgoing.values()]
        found = {
            rank: [torch.zeros(aval.shape, dtype=aval.dtype) for aval in avals] for rank, avals in incoming.items()
        }
        del joined
        return found


def chain_of(draw: random.Random, name: str, ranks: int, microbatches: int) -> tuple[Any, Mesh]:
    parts = [fp.remat(every=draw.choice([1, 2]))] if draw.random() < 0.3 else []
    data = draw.choice([1, 2])
    parts += [fp.zero(draw.randrange(4), "data", keep_gathered=draw.random() < 0.3)] if data > 1 else []
    mesh = Mesh(pipe=ranks, data=data) if data > 1 else Mesh(pipe=ranks)
    return fp.chain(*parts, pipeline(made(name, ranks, microbatches))), mesh


def skipping(params: Any, x: Tensor) -> Tensor:
    first = x
    for number, layer in enumerate(params):
        x = x + torch.tanh(x @ layer["in"]) @ layer["out"]
        x = torch.cat([x, first], -1)[..., : x.shape[-1]] if number % 3 == 2 else x
    return (x**2).mean()


def model_of(draw: random.Random, depth: int, asynchronous: bool) -> tuple[Callable[..., Any], Any, Any]:
    generator = torch.Generator().manual_seed(0)
    if draw.random() < 0.4 and not asynchronous:
        config = gpt.Config(depth, 16, 2, 8, tied=draw.random() < 0.5)
        params, _ = split(gpt.init(config, 0))
        return partial(gpt.loss, config=config), params, lambda size: torch.randint(0, 256, (size, 9))
    width, inner = draw.choice([4, 12]), draw.choice([8, 32])
    layers = range(depth + draw.randrange(3))
    params = [
        {"in": torch.randn(width, inner, generator=generator), "out": torch.randn(inner, width, generator=generator)}
        for _ in layers
    ]
    return (
        skipping if draw.random() < 0.5 and not asynchronous else plain,
        params,
        lambda size: torch.randn(size, width),
    )


def plain(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        x = x + torch.tanh(x @ layer["in"]) @ layer["out"]
    return (x**2).mean()


def random_step(seed: int) -> tuple[str, PipelineProgram]:
    """A training step, or a gradient, of a random plan with a random schedule."""
    draw = random.Random(seed)
    asynchronous = seed % 6 == 5
    name = draw.choice(["pipedream", "2bw"] if asynchronous else SYNCHRONOUS)
    ranks = 2 if "dualpipe" in name else draw.choice([2, 3, 4])
    if name == "zb-v" or "v" in name:
        ranks = 2
    microbatches = 2 * ranks
    plan, mesh = chain_of(draw, name, ranks, microbatches)
    f, params, batch = model_of(draw, made(name, ranks, microbatches).depth, asynchronous)
    x = batch(2 * microbatches * mesh.shape.get("data", 1))
    words = f"{name} on {ranks}: {plan!r}"
    if draw.random() < 0.3 and not asynchronous:
        return f"gradient, {words}", fp.compile(fp.grad_and_value(plan(f)), mesh).lower(params, x)
    optimizer = draw.choice(sorted(OPTIMIZERS))
    clip = draw.choice([None, 1.0]) if not asynchronous else None
    train = fp.train_step(f, OPTIMIZERS[optimizer], mesh, plan, clip=clip, donate=draw.random() < 0.7)
    return f"{optimizer}, clip {clip}, {words}", train.lower(train.init(params), x)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.every(5)
def test_the_predicted_peak_of_every_rank_is_the_measured_one(seed: int) -> None:
    words, program = random_step(seed)
    predicted = [rank.peak for rank in program.memory().ranks]
    found = [OneRank(program, rank).peak() for rank in range(program.schedule.ranks)]
    slack = results_of_kernels(program)
    assert all(0 <= b - a <= slack for a, b in zip(predicted, found, strict=True)), (words, predicted, found)


def results_of_kernels(program: PipelineProgram) -> int:
    """Bytes of messages that lie otherwise when they arrive than a kernel left them: a view of them may copy."""
    sent = {node for stage in program.stages for node in (*stage.sends_forward, *stage.sends_backward)}
    return sum(info(node).aval.nbytes for node in sent if node.target is operator.getitem)


# -----------------------------------------------------------------------------
# All ranks together
# -----------------------------------------------------------------------------


def bytes_kept(worker: RankExecutor, action: Action) -> int:
    """The bytes of all storages that an action leaves for those after it, each counted once."""
    leaves = optree.tree_leaves(list(worker.held.get((action.stage, action.microbatch), {}).values()))
    sizes = {id(x): x.size for x in leaves if isinstance(x, SimulatedStorage)}
    storages = [x.untyped_storage() for x in leaves if isinstance(x, Tensor)]
    return sum({**sizes, **{storage.data_ptr(): storage.nbytes() for storage in storages}}.values())


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_an_action_leaves_is_what_the_executor_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[tuple[Action, int]]] = {}
    act = RankExecutor.act

    def watched(self: RankExecutor, action: Action) -> Any:
        sent = act(self, action)
        found.setdefault(self.rank, []).append((action, bytes_kept(self, action)))
        return sent

    monkeypatch.setattr(RankExecutor, "act", watched)
    schedule = made(name, 2, 4)
    step = fp.compile(fp.grad(pipeline(schedule)(plain)), Mesh(pipe=2))
    params = [{"in": torch.randn(4, 8), "out": torch.randn(8, 4)} for _ in range(schedule.depth)]
    args = params, torch.randn(2 * schedule.microbatches, 4)
    program = step.lower(*args)
    step(*args)
    measured = dict(found)
    found.clear()
    program.memory()
    assert found == measured
    assert max(size for _, size in measured[0]) > 0


def holding(rank: int, names: Sequence[str]) -> list[tuple[int, int]]:
    """On a rank of real pipelines, the peaks that are predicted and those measured in a second step.

    Messages go through gloo, since memory that ranks share is the runtime's, and in no program.
    """
    torch.manual_seed(0)
    use_runtime(ProcessRuntime(Mesh(pipe=2), algorithm="backend"))
    return [peaks(rank, name) for name in names]


def peaks(rank: int, name: str) -> tuple[int, int]:
    params = [{"in": torch.randn(32, 64), "out": torch.randn(64, 32)} for _ in range(8)]
    plan = fp.pipeline("pipe", schedule=name, microbatches=4)
    train = fp.train_step(plain, fp.optim.adamw(1e-3), Mesh(pipe=2), plan)
    x = torch.randn(64, 32)
    state, _ = train(train.init(params), x)
    handles = [part for handle in state.handles for part in handle.parts.values()]
    with torch.no_grad(), tracked(handles) as tracker:
        del handles
        train(state, x)
    return train.program.memory().ranks[rank].peak, tracker.peak


def test_real_processes_hold_what_is_predicted() -> None:
    """Within a tenth: how long a message takes is theirs."""
    names = ["1f1b", "gpipe", "zb-v"]
    for found in run_on_processes(holding, 2, names):
        for name, (predicted, measured) in zip(names, found, strict=True):
            assert abs(measured - predicted) < 0.1 * predicted, (name, predicted, measured)


# -----------------------------------------------------------------------------
# What it says
# -----------------------------------------------------------------------------


LAYER = 2 * 16 * 64 * 4  # bytes


@cache
def gpt_like(schedule: str, *others: Any, mesh: Mesh | None = None) -> PipelineProgram:
    """Of four stages, each a layer."""
    params = [{"in": torch.empty(16, 64), "out": torch.empty(64, 16)} for _ in range(4)]
    plan = fp.chain(*others, fp.pipeline("pipe", schedule=schedule, microbatches=8))
    train = fp.train_step(plain, fp.optim.adamw(1e-3), mesh or Mesh(pipe=4), plan)
    return train.lower(train.init(params), torch.empty(256, 16))


def test_what_is_alive_adds_up() -> None:
    memory = gpt_like("1f1b", fp.zero(1, "data"), mesh=Mesh(pipe=4, data=2)).memory()
    whole = 4 * LAYER
    for rank in memory.ranks:
        assert sum(rank.alive.values()) == rank.peak == rank.curve[rank.at] == max(rank.curve)
        assert rank.alive["parameters"] == whole // 4
        assert rank.alive["optimizer state"] - whole // 4 in (4, 8)  # of m and v a half each, and counts
        assert rank.alive["gradients"] >= whole // 4
    assert memory.peak == max(rank.peak for rank in memory.ranks)
    assert memory.to_dict()["ranks"][3]["peak"] == memory.ranks[3].peak
    worst, text = [rank.peak for rank in memory.ranks].index(memory.peak), str(memory)
    assert "train_step: at most" in text and f"rank {worst} of 'pipe'" in text
    header, *rows = text.splitlines()[1:6]
    assert header.split()[:3] == ["rank", "peak", "parameters"] and "residuals" in header and "messages" in header
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]


def test_schedules_hold_what_is_published_of_them() -> None:
    """GPipe keeps all microbatches' residuals, 1F1B those of as many as there are ranks from here on."""
    gpipe, one = (gpt_like(name).memory() for name in ("gpipe", "1f1b"))
    last = one.ranks[3].alive["residuals"]
    ratios = [rank.alive["residuals"] / last for rank in one.ranks]
    assert ratios[0] > ratios[1] > ratios[2] > 1.2
    assert gpipe.ranks[3].alive["residuals"] > 6 * last
    assert gpipe.peak > one.peak


def test_an_asynchronous_pipeline_holds_versions() -> None:
    """PipeDream's first stage of four keeps four versions of its weights; the last one keeps one."""
    program = gpt_like("pipedream")
    memory, kept = program.memory(), schedules.kept_versions(program.schedule)
    weights = [rank.alive["parameters"] for rank in memory.ranks]
    assert [size // LAYER for size in weights] == [1 + count + 1 for count in kept]  # the caller's, the new
    assert {rank.alive["optimizer state"] // (2 * LAYER) for rank in memory.ranks} == {3}  # and the newest


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpt_like("1f1b").memory().plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000
