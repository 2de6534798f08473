"""A step cut into the programs of a pipeline's stages, with the schedule that says which runs when."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import fx

from sharding_specs import Mesh, P

from ..program import Program
from ..program.collectives import Collective, bytes_of, counts_of
from ..program.explain import Explanation, explain
from ..program.hardware import Hardware, hardware_of
from ..program.price import Price
from ..schedules import Action, Event, Schedule, Timeline, peaks
from ..tracing.graph import source_of
from .epilogue import Epilogue
from .extract import Part
from .prologue import Prologue
from .roles import PipelineError
from .stages import Stage

__all__ = ["PipelineProgram"]


@dataclass(eq=False)
class PipelineProgram:
    """What the ranks of a pipeline run in a step: like a `Program`, but another one on every rank of the axis.

    Attributes:
        axis: the mesh axis of the pipeline.
        schedule: what runs when.
        stages: the programs of each stage of the model.
        prologues: per rank of the axis, what runs before the pipeline fills.
        epilogue: what runs after it has drained.
        mesh, in_specs, out_specs, in_paths, out_paths, name, passes, notes: as those of a `Program`.
    """

    axis: str
    schedule: Schedule
    stages: list[Stage]
    prologues: list[Prologue]
    epilogue: Epilogue
    inputs: list[fx.Node]
    collected: frozenset[fx.Node]  # values of single microbatches that are results
    cut_dims: dict[fx.Node, int]  # of inputs that are cut into microbatches, the dim
    mesh: Mesh
    in_specs: list[P]
    out_specs: list[P]
    in_paths: list[str]
    out_paths: list[str]
    name: str
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
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
        return stage.sends_forward if action.kind == "F" else stage.sends_backward

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
        counts = Counter((action.kind, action.stage % self.schedule.depth) for action in self.schedule)
        for (kind, index), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            yield self.stages[index].works[kind].first.program, count
        for level in self.epilogue.parts:
            for part in level.values():
                yield part.program, 1

    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """Every collective of a step, over all ranks of the pipeline; messages between stages are sends."""
        found = [one for program, count in self.programs() for one in program.collectives(casts=casts) * count]
        return [*found, *self._sends()]

    def _sends(self) -> Iterator[Collective]:
        ranks = self.schedule.rank_of_stage
        for action in self.schedule:
            other = self.neighbour(action)
            if other is not None and ranks[other] != ranks[action.stage]:
                yield from map(self._send, self.message(action))
        for level in self.epilogue.exchanges:
            yield from (self._send(exchange.node) for exchange in level)

    def _send(self, node: fx.Node) -> Collective:
        value = node.meta["val"]
        return Collective(
            "send", (self.axis,), value, value, value.nbytes, source_of(node), node.meta["backward"], node
        )

    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """How many collectives of each kind, per axes."""
        return counts_of(self.collectives())

    def bytes_sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes sent, per kind and axes: the sum over the pipeline's ranks of what one rank of the rest sends."""
        return bytes_of(self.collectives())

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation:
        """A table of every collective, over all ranks of the pipeline; see `Program.explain`."""
        size = self.mesh.axis_size(self.axis)
        notes = (*self.notes, f"counts and bytes are sums over the {size} ranks of {self.axis!r}")
        return explain(self.name, repr(self.mesh), self.collectives(casts=casts), group=group, notes=notes)

    def price(self, hardware: Hardware | str = "h100") -> Price:
        """What a step takes on a machine, as `Program.price` says it: listed is the rank that works longest."""
        from .price import price_of_pipeline  # it takes pipelines apart

        return price_of_pipeline(self, hardware_of(hardware))

    def memory(self) -> NoReturn:
        """Not predicted for a pipeline yet, and says so.

        Raises:
            PipelineError: always.
        """
        raise PipelineError(
            "the memory of a pipeline's ranks is not predicted yet: it is that of single programs, such as "
            "program.stages[0].works['F'].first.program.memory(), and of as many residuals as schedules.peaks says"
        )

    def lines(self) -> list[str]:
        """The text of all programs without source lines: equal for two pipelines exactly when they do the same."""
        lines = [f"mesh {self.mesh!r}", *str(self.schedule).splitlines()]
        for program, count in self.programs():
            lines += [f"{program.name}, {count} times", *program.lines()]
        return lines

    def fingerprint(self) -> str:
        """A hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

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
    for kind, index in dict.fromkeys((a.kind, a.stage % schedule.depth) for a in schedule.actions[rank]):
        yield stages[index].works[kind].first
