"""A step cut into the programs of a pipeline's stages, with the schedule that says which runs when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ..program import BaseProgram, Program
from ..program.collectives import Collective, bytes_of, counts_of
from ..program.explain import readable_bytes
from ..program.hardware import Hardware, hardware_of
from ..program.price import Price
from ..schedules import Action, Event, Schedule, Timeline, peaks
from ..tracing.graph import source_of
from .epilogue import Epilogue
from .extract import Part
from .memory import PipelineMemory
from .price import price_of_pipeline
from .prologue import Prologue
from .roles import PipelineError
from .stages import Stage

__all__ = ["PipelineProgram"]


@dataclass(eq=False)
class PipelineProgram(BaseProgram):
    """What the ranks of a pipeline run in a step: like a `Program`, but another one on every rank of the axis.

    Attributes:
        axis: the mesh axis of the pipeline.
        schedule: what runs when.
        stages: the programs of each stage of the model.
        prologues: per rank of the axis, what runs before the pipeline fills.
        epilogue: what runs after it has drained.
    """

    axis: str
    schedule: Schedule
    stages: list[Stage]
    prologues: list[Prologue]
    epilogue: Epilogue
    inputs: list[fx.Node]
    collected: frozenset[fx.Node]  # values of single microbatches that are results
    cut_dims: dict[fx.Node, int]  # of inputs that are cut into microbatches, the dim
    memory_by: Callable[[PipelineProgram], PipelineMemory] | None = field(default=None, repr=False)  # the executor
    events: list[Event] | None = None  # what `record` asks for

    def record(self) -> None:
        """From now on, note when every action runs, for `timeline`; a device is waited for around each."""
        self.events = []

    def timeline(self) -> Timeline:
        """When the actions of the last run ran, on the ranks whose other coordinates are 0; times in seconds.

        Raises:
            PipelineError: when `record` was not called before it.
        """
        if not self.events:
            raise PipelineError("nothing was recorded: call program.record() and run a step first")
        first = min(event.start for event in self.events)
        rows: list[dict[Action, Event]] = [{} for _ in self.schedule.actions]
        for event in self.events:
            shifted = event._replace(start=event.start - first, end=event.end - first)
            rows[event.rank].setdefault(event.action, shifted)
        return Timeline(
            self.schedule, tuple(tuple(row.values()) for row in rows), tuple(map(float, peaks(self.schedule)))
        )

    @property
    def updates(self) -> int:
        """How often a stage's weights change in a step: once, but for asynchronous schedules."""
        return updates_of(self.schedule)

    def stage_of(self, action: Action) -> Stage:
        """The stage of the model that an action runs; chains run copies of it."""
        return self.stages[action.stage % self.schedule.depth]

    def microbatch_of(self, action: Action) -> int:
        """The number of an action's microbatch in the batch; chains take theirs one after another."""
        return action.stage // self.schedule.depth * self.schedule.microbatches_of_chain + action.microbatch

    def neighbour(self, action: Action) -> int | None:
        """The stage that takes what an action makes."""
        if action.kind == "W":
            return None
        return self.schedule.after(action.stage) if action.kind == "F" else self.schedule.before(action.stage)

    def message(self, action: Action) -> tuple[fx.Node, ...]:
        """What that stage is sent."""
        stage = self.stage_of(action)
        return stage.sends(action.kind)

    def awaited(self, action: Action) -> list[Action]:
        """The actions of neighbouring stages that an action may wait for."""
        if action.kind == "F":
            before = self.schedule.before(action.stage)
            return [] if before is None else [Action("F", before, action.microbatch)]
        after = self.schedule.after(action.stage)
        if action.kind == "W" or after is None:
            return []
        return [Action(kind, after, action.microbatch) for kind in "BI"]

    def programs(self) -> Iterator[tuple[Program, int]]:
        """Every program with how often it runs in a step, over all ranks of the pipeline."""
        for prologue in self.prologues:
            yield prologue.program, 1
        yield from self._works()
        for level in self.epilogue.parts:
            for part in level.values():
                yield part.program, 1

    def every_program(self) -> Iterator[Program]:
        """Every program once, those that add to what an earlier microbatch left included."""
        yield from (prologue.program for prologue in self.prologues)
        for stage in self.stages:
            for work in stage.works.values():
                yield from work.programs
        for level in self.epilogue.parts:
            yield from (part.program for part in level.values())

    def _works(self) -> Iterator[tuple[Program, int]]:
        """The programs of the stages, each with how often it runs in a step."""
        counts = Counter((action.kind, action.stage % self.schedule.depth) for action in self.schedule)
        for (kind, index), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            yield self.stages[index].works[kind].first.program, count

    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """Every collective of a step, over all ranks of the pipeline; messages between stages are sends."""
        found = [one for program, count in self.programs() for one in program.collectives(casts=casts) * count]
        return [*found, *self._sends()]

    def _sends(self) -> Iterator[Collective]:
        ranks = self.schedule.rank_of_stage
        for action in self.schedule:
            other = self.neighbour(action)
            if other is not None and ranks[other] != ranks[action.stage]:
                phase = "forward" if action.kind == "F" else "backward"
                yield from (self._send(node, phase) for node in self.message(action))
        for level in self.epilogue.exchanges:
            yield from (self._send(exchange.node, exchange.phase) for exchange in level)

    def _send(self, node: fx.Node, phase: str) -> Collective:
        value = node.meta["val"]
        return Collective("send", (self.axis,), value, value, value.nbytes, source_of(node), phase, node)

    def per_microbatch(self) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
        """Of `collectives()`, without messages between stages, those that every microbatch does anew: count and bytes.

        With ZeRO 0 to 2 that is the loss's sum alone, since gradients are summed and parameters gathered once a step.
        ZeRO-3 gathers a stage's parameters for every forward and backward, unless with `keep_gathered`.
        """
        found: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
        for program, runs in self._works():
            collectives, share = program.collectives(), runs / self.schedule.microbatches
            sizes = bytes_of(collectives)
            for key, count in counts_of(collectives).items():
                before = found.get(key, (0.0, 0.0))
                found[key] = before[0] + count * share, before[1] + sizes[key] * share
        return found

    def remarks(self) -> tuple[str, ...]:
        """What `explain` prints below its table of collectives."""
        size = self.mesh.axis_size(self.axis)
        anew = [
            f"{count:g} {kind} over {', '.join(axes)}, {readable_bytes(round(sent))}"
            for (kind, axes), (count, sent) in self.per_microbatch().items()
        ]
        each = f"of these, each of {self.schedule.microbatches} microbatches does anew: {'; '.join(anew)}"
        sums = f"counts and bytes are sums over the {size} ranks of {self.axis!r}"
        return (*self.notes, sums, each) if anew else (*self.notes, sums)

    def price(self, hardware: Hardware | str = "h100") -> Price:
        """What a step takes on a machine, as `Program.price` says it: listed is the rank that works longest."""
        return price_of_pipeline(self, hardware_of(hardware))

    def memory(self) -> PipelineMemory:
        """Bytes of live tensors on the ranks of the pipeline, program by program: each as `Program.memory()` has it.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = torch.tanh(x @ w)
        ...     return x.sum()
        >>> step = fp.compile(fp.grad(fp.pipeline("pipe", microbatches=8)(loss)), Mesh(pipe=4))
        >>> memory = step.lower([torch.ones(8, 8)] * 4, torch.ones(64, 8)).memory()
        >>> [rank.peak > 0 for rank in memory.ranks], memory.peak == max(rank.peak for rank in memory.ranks)
        ([True, True, True, True], True)

        Counted is what a rank holds in every step after the first: its stages' parameters and optimizer state, the
        batch, sums of gradients, residuals of microbatches under way, messages, and what a program takes while it runs.
        Microbatches are added up in order, as with `reduction="ordered"`; "fast" holds no more.
        """
        assert self.memory_by is not None, "build() alone does not know the executor"
        return self.memory_by(self)

    def holders(self, node: fx.Node) -> frozenset[int]:
        """The ranks of the axis that hold an input of the step: of what steps hand on, from the second step on."""
        return self._holders[node]

    @cached_property
    def _holders(self) -> dict[fx.Node, frozenset[int]]:
        everywhere = frozenset(range(self.schedule.ranks))
        found = {n: everywhere if not n.meta.get("parameter") else self._users(n) for n in self.inputs}
        for output, ranks in zip(self.epilogue.outputs, self.epilogue.output_holders, strict=True):
            replaced = self.epilogue.replaces.get(output)
            if replaced is not None and replaced.meta.get("carried"):
                found[replaced] = ranks
        return found

    def _users(self, node: fx.Node) -> frozenset[int]:
        """The ranks that take an input."""
        return frozenset(rank for rank, taken in enumerate(self._taken) if node in taken)

    @cached_property
    def _taken(self) -> list[set[fx.Node]]:
        """Per rank, the inputs of the step that it takes."""
        given = {new: given.node for new, given in self.epilogue.given.items() if given.kind == "input"}
        found = []
        for rank, prologue in enumerate(self.prologues):
            taken = {
                *prologue.inputs,
                *(n for part in parts_of_rank(self.stages, self.schedule, rank) for n in part.inputs),
            }
            late = [node for level in self.epilogue.parts if rank in level for node in level[rank].inputs]
            late += [
                n for n, ranks in zip(self.epilogue.outputs, self.epilogue.output_holders, strict=True) if rank in ranks
            ]
            found.append(taken | {given[node] for node in late if node in given})
        return found

    def programs_of_rank(self, rank: int) -> Iterator[Program]:
        """Every program that a rank may run."""
        yield self.prologues[rank].program
        for kind, index in _works_of_rank(self.schedule, rank):
            yield from self.stages[index].works[kind].programs
        yield from (level[rank].program for level in self.epilogue.parts if rank in level)

    def lines(self) -> list[str]:
        """The text of all programs without source lines: equal for two pipelines exactly when they do the same."""
        lines = [f"mesh {self.mesh!r}", *str(self.schedule).splitlines()]
        for program, count in self.programs():
            lines += [f"{program.name}, {count} times", *program.lines()]
        return lines

    def __str__(self) -> str:
        texts = [f"{program}\n({count} times a step)" for program, count in self.programs()]
        return "\n\n".join([f"{self.name} on {self.mesh!r}", str(self.schedule), *texts])


def updates_of(schedule: Schedule) -> int:
    """How many updates a stage makes in a run of a schedule."""
    if schedule.versions is None:
        return 1
    return sum(action.stage == 0 for action in schedule.versions.writes)


def parts_of_rank(stages: list[Stage], schedule: Schedule, rank: int) -> Iterator[Part]:
    """The programs of all stages that a rank of the pipeline runs."""
    for kind, index in _works_of_rank(schedule, rank):
        yield stages[index].works[kind].first


def _works_of_rank(schedule: Schedule, rank: int) -> Iterable[tuple[str, int]]:
    return dict.fromkeys((action.kind, action.stage % schedule.depth) for action in schedule.actions[rank])
