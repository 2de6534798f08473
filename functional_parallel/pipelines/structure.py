"""The parts of a pipelined step, and which rank runs what when.

`PipelineProgram` adds the questions: collectives, memory, price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from ..ir import info
from ..program import BaseProgram, Program
from ..schedules import Action, Schedule
from .epilogue import Epilogue
from .extract import Subprogram
from .prologue import Prologue
from .stages import Stage

__all__ = ["PipelineStructure", "parts_of_rank", "updates_of"]


@dataclass(eq=False)
class PipelineStructure(BaseProgram):
    """The programs of a pipelined step with their schedule.

    Attributes:
        axis: the mesh axis of the pipeline.
        schedule: what runs when.
        stages: the programs of each stage of the model.
        prologues: per rank of the axis, what runs before the pipeline fills.
        epilogue: what runs after it has drained.
        inputs: the inputs of the step.
        collected: values of single microbatches that are results.
        cut_dims: of inputs that are cut into microbatches, the dim.
    """

    axis: str
    schedule: Schedule
    stages: list[Stage]
    prologues: list[Prologue]
    epilogue: Epilogue
    inputs: list[fx.Node]
    collected: frozenset[fx.Node]
    cut_dims: dict[fx.Node, int]

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
        yield from self.stage_programs()
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

    def programs_of_rank(self, rank: int) -> Iterator[Program]:
        """Every program that a rank may run."""
        yield self.prologues[rank].program
        for kind, index in _works_of_rank(self.schedule, rank):
            yield from self.stages[index].works[kind].programs
        yield from (level[rank].program for level in self.epilogue.parts if rank in level)

    def stage_programs(self) -> Iterator[tuple[Program, int]]:
        """The programs of the stages, each with how often it runs in a step."""
        counts = Counter((action.kind, action.stage % self.schedule.depth) for action in self.schedule)
        for (kind, index), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            yield self.stages[index].works[kind].first.program, count

    def holders(self, node: fx.Node) -> frozenset[int]:
        """The ranks of the axis that hold an input of the step: of what steps hand on, from the second step on."""
        return self._holders[node]

    @cached_property
    def _holders(self) -> dict[fx.Node, frozenset[int]]:
        everywhere = frozenset(range(self.schedule.ranks))
        found = {n: everywhere if not info(n).is_parameter else self._users(n) for n in self.inputs}
        for output, ranks in zip(self.epilogue.outputs, self.epilogue.output_holders, strict=True):
            replaced = self.epilogue.replaces.get(output)
            if replaced is not None and info(replaced).is_state:
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


def updates_of(schedule: Schedule) -> int:
    """How many updates a stage makes in a run of a schedule."""
    if schedule.versions is None:
        return 1
    return sum(action.stage == 0 for action in schedule.versions.writes)


def parts_of_rank(stages: list[Stage], schedule: Schedule, rank: int) -> Iterator[Subprogram]:
    """The programs of all stages that a rank of the pipeline runs."""
    for kind, index in _works_of_rank(schedule, rank):
        yield stages[index].works[kind].first


def _works_of_rank(schedule: Schedule, rank: int) -> Iterable[tuple[str, int]]:
    return dict.fromkeys((action.kind, action.stage % schedule.depth) for action in schedule.actions[rank])
