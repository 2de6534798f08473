"""Structure of a pipelined step: its programs, with the rank and order of each. `PipelineProgram` adds queries."""

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
    """Programs of a pipelined step with their schedule."""

    axis: str
    schedule: Schedule
    stages: list[Stage]
    prologues: list[Prologue]  # by rank of the axis
    epilogue: Epilogue
    inputs: list[fx.Node]  # of the step
    collected: frozenset[fx.Node]  # per-microbatch values that are results
    cut_dims: dict[fx.Node, int]  # for each input that is cut into microbatches

    @property
    def updates(self) -> int:
        """Number of updates of a stage's weights in a step: 1 except with asynchronous schedules."""
        return updates_of(self.schedule)

    def stage_of(self, action: Action) -> Stage:
        """Return the stage of the model that an action runs. Each chain runs a copy of the stages."""
        return self.stages[action.stage % self.schedule.depth]

    def microbatch_of(self, action: Action) -> int:
        """Return the number of an action's microbatch in the batch. Each chain has a contiguous range of them."""
        return action.stage // self.schedule.depth * self.schedule.microbatches_of_chain + action.microbatch

    def neighbour(self, action: Action) -> int | None:
        """Return the stage that receives the values of an action; None without a receiver."""
        if action.kind == "W":
            return None
        return self.schedule.after(action.stage) if action.kind == "F" else self.schedule.before(action.stage)

    def message(self, action: Action) -> tuple[fx.Node, ...]:
        """Return the values that an action sends to its neighbour."""
        return self.stage_of(action).sends(action.kind)

    def awaited(self, action: Action) -> list[Action]:
        """Return the actions of neighbouring stages that an action may wait for."""
        if action.kind == "F":
            before = self.schedule.before(action.stage)
            return [] if before is None else [Action("F", before, action.microbatch)]
        after = self.schedule.after(action.stage)
        if action.kind == "W" or after is None:
            return []
        return [Action(kind, after, action.microbatch) for kind in "BI"]

    def programs(self) -> Iterator[tuple[Program, int]]:
        """Yield every program with its number of runs in a step, over all ranks of the pipeline."""
        for prologue in self.prologues:
            yield prologue.program, 1
        yield from self.stage_programs()
        for level in self.epilogue.parts:
            for part in level.values():
                yield part.program, 1

    def every_program(self) -> Iterator[Program]:
        """Yield every program once, including the programs that add to running sums."""
        yield from (prologue.program for prologue in self.prologues)
        for stage in self.stages:
            for work in stage.works.values():
                yield from work.programs
        for level in self.epilogue.parts:
            yield from (part.program for part in level.values())

    def programs_of_rank(self, rank: int) -> Iterator[Program]:
        """Yield every program that a rank may run."""
        yield self.prologues[rank].program
        for kind, index in _works_of_rank(self.schedule, rank):
            yield from self.stages[index].works[kind].programs
        yield from (level[rank].program for level in self.epilogue.parts if rank in level)

    def stage_programs(self) -> Iterator[tuple[Program, int]]:
        """Yield the programs of the stages, each with its number of runs in a step."""
        counts = Counter((action.kind, action.stage % self.schedule.depth) for action in self.schedule)
        for (kind, index), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            yield self.stages[index].works[kind].first.program, count

    def holders(self, node: fx.Node) -> frozenset[int]:
        """Return the ranks that hold an input of the step; for state that a step returns, from the second step on."""
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
        """Return the ranks that read an input."""
        return frozenset(rank for rank, taken in enumerate(self._taken) if node in taken)

    @cached_property
    def _taken(self) -> list[set[fx.Node]]:
        """For each rank, the inputs of the step that it reads."""
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
    """Return the number of updates of a stage in a run of a schedule."""
    if schedule.versions is None:
        return 1
    return sum(action.stage == 0 for action in schedule.versions.writes)


def parts_of_rank(stages: list[Stage], schedule: Schedule, rank: int) -> Iterator[Subprogram]:
    """Yield the stage programs that a rank of the pipeline runs."""
    for kind, index in _works_of_rank(schedule, rank):
        yield stages[index].works[kind].first


def _works_of_rank(schedule: Schedule, rank: int) -> Iterable[tuple[str, int]]:
    return dict.fromkeys((action.kind, action.stage % schedule.depth) for action in schedule.actions[rank])
