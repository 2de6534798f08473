"""Structure of a pipelined step: its programs, with the rank and order of each. `PipelineProgram` adds queries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from ..ir import forget_rewrites, info
from ..program import BaseProgram, Program
from ..schedules import Action, Schedule, receiving_stage
from .epilogue import Epilogue
from .extract import Subprogram
from .prologue import Prologue
from .stages import Stage


@dataclass(eq=False)
class PipelineStructure(BaseProgram):
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
        return self.stages[action.stage % self.schedule.depth]

    def microbatch_of(self, action: Action) -> int:
        """Return the number of an action's microbatch in the batch. Each chain has a contiguous range of them."""
        return action.stage // self.schedule.depth * self.schedule.microbatches_of_chain + action.microbatch

    def neighbour(self, action: Action) -> int | None:
        return receiving_stage(self.schedule, action)

    def message(self, action: Action) -> tuple[fx.Node, ...]:
        return self.stage_of(action).sends(action.kind)

    def sends(self, rank: int) -> Iterator[tuple[fx.Node, str]]:
        """Yield the values that a rank sends to neighbouring stages of other ranks, each with the phase of the step."""
        for action in self.schedule.actions[rank]:
            other = self.neighbour(action)
            if other is not None and self.schedule.rank_of_stage[other] != rank:
                yield from ((node, "forward" if action.kind == "F" else "backward") for node in self.message(action))

    def awaited(self, action: Action) -> list[Action]:
        kinds = {"F": "F", "W": ""}.get(action.kind, "BI")
        other = self.schedule.before(action.stage) if kinds == "F" else self.schedule.after(action.stage)
        return [] if other is None else [Action(kind, other, action.microbatch) for kind in kinds]

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
        yield from dict.fromkeys(part.program for part in self._parts())

    def _parts(self) -> Iterator[Subprogram]:
        for stage in self.stages:
            for work in stage.works.values():
                yield from work.parts
        for level in self.epilogue.parts:
            yield from level.values()

    def programs_of_rank(self, rank: int) -> Iterator[Program]:
        """Yield every program that a rank may run."""
        yield self.prologues[rank].program
        for kind, index in _works_of_rank(self.schedule, rank):
            yield from dict.fromkeys(part.program for part in self.stages[index].works[kind].parts)
        yield from (level[rank].program for level in self.epilogue.parts if rank in level)

    def stage_programs(self) -> Iterator[tuple[Program, int]]:
        """Yield the programs of the stages, each with its number of runs in a step."""
        counts = Counter((action.kind, action.stage % self.schedule.depth) for action in self.schedule)
        for (kind, index), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            yield self.stages[index].works[kind].first.program, count

    def forget_ops(self) -> None:
        """Remove the operands of the step's and epilogue's nodes, which name inputs and outputs of the programs."""
        names = set(self._names())
        for graph in {node.graph for node in names}:
            for node in reversed(list(graph.nodes)):
                if node in names:
                    node.args, node.kwargs = (), {}
                else:
                    graph.erase_node(node)
            forget_rewrites(graph)

    def _names(self) -> Iterator[fx.Node]:
        yield from (*self.inputs, *self.collected)
        for prologue in self.prologues:
            yield from (*prologue.inputs, *(node for node, _ in prologue.outputs))
        for stage in self.stages:
            yield from (*stage.sends_forward, *stage.sends_backward, *stage.after_forward, *stage.after_input)
            for work in stage.works.values():
                yield from work.totals
        for part in self._parts():
            yield from (*part.inputs, *part.outputs)
        epilogue = self.epilogue
        yield from (*epilogue.given, *(given.node for given in epilogue.given.values()))
        yield from (exchange.node for level in epilogue.exchanges for exchange in level)
        yield from (*epilogue.outputs, *epilogue.replaces, *epilogue.replaces.values())

    def holders(self, node: fx.Node) -> frozenset[int]:
        """Return the ranks that hold an input of the step; for state that a step returns, from the second step on."""
        return self._holders[node]

    @cached_property
    def _holders(self) -> dict[fx.Node, frozenset[int]]:
        epilogue, readers = self.epilogue, defaultdict[fx.Node, set[int]](set)
        given = {new: given.node for new, given in epilogue.given.items() if given.kind == "input"}
        for rank, prologue in enumerate(self.prologues):
            late = [level[rank] for level in epilogue.parts if rank in level]
            taken = [given[node] for part in late for node in part.inputs if node in given]
            taken += (node for part in parts_of_rank(self.stages, self.schedule, rank) for node in part.inputs)
            for node in (*prologue.inputs, *taken):
                readers[node].add(rank)
        results = list(zip(epilogue.outputs, epilogue.output_holders, strict=True))
        for output, ranks in results:
            if output in given:
                readers[given[output]] |= ranks
        everywhere = range(self.schedule.ranks)
        found = {node: frozenset(readers[node] if info(node).is_parameter else everywhere) for node in self.inputs}
        for output, ranks in results:
            replaced = epilogue.replaces.get(output)
            if replaced is not None and info(replaced).is_state:
                found[replaced] = ranks
        return found


def updates_of(schedule: Schedule) -> int:
    if schedule.versions is None:
        return 1
    return sum(action.stage == 0 for action in schedule.versions.writes)


def parts_of_rank(stages: list[Stage], schedule: Schedule, rank: int) -> Iterator[Subprogram]:
    for kind, index in _works_of_rank(schedule, rank):
        yield stages[index].works[kind].first


def _works_of_rank(schedule: Schedule, rank: int) -> Iterable[tuple[str, int]]:
    return dict.fromkeys((action.kind, action.stage % schedule.depth) for action in schedule.actions[rank])
