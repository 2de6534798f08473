"""State of one rank of a pipeline during a step, and the effect of each action on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...program import Program
from ...schedules import Action
from ..stages import ActionPrograms
from ..structure import PipelineStructure

RunProgram = Callable[[Program, list[Any]], list[Any]]


class RankExecutor:
    """Runs the actions of one rank. If `ordered`, microbatches are summed in their own order."""

    def __init__(
        self, program: PipelineStructure, rank: int, run: RunProgram, inputs: dict[fx.Node, Any], ordered: bool
    ) -> None:
        self.ordered = ordered
        self.program, self.rank, self.run, self.inputs = program, rank, run, inputs
        self.once: dict[fx.Node, Any] = {}
        self.of_microbatch: defaultdict[int, dict[fx.Node, Any]] = defaultdict(dict)
        self.held: dict[tuple[int, int], dict[fx.Node, Any]] = {}  # by stage, microbatch: residuals, received values
        self.totals: defaultdict[int, dict[fx.Node, Any]] = defaultdict(dict)  # by chain: the running sums
        self.collected: dict[tuple[fx.Node, int], Any] = {}
        self.late: dict[fx.Node, Any] = {}  # values of the epilogue
        self.turn: dict[tuple[fx.Node, int], int] = {}  # by sum and chain: the next microbatch to add
        self.early: dict[tuple[fx.Node, int], dict[int, Any]] = {}  # by sum and chain: summands before their turn

    def begin(self) -> None:
        prologue = self.program.prologues[self.rank]
        made = self.run(prologue.program, [self.inputs[node] for node in prologue.inputs])
        for (node, microbatch), value in zip(prologue.outputs, made, strict=True):
            if microbatch is None:
                self.once[node] = value
            else:
                self.of_microbatch[microbatch][node] = value

    def end(self, level: int) -> None:
        part = self.program.epilogue.parts[level].get(self.rank)
        if part is not None:
            made = self.run(part.program, [self.late_value(node) for node in part.inputs])
            self.late.update(zip(part.outputs, made, strict=True))

    def late_value(self, node: fx.Node) -> Any:
        if node in self.late:
            return self.late[node]
        kind, value, which = self.program.epilogue.given[node]
        if kind == "input":
            return self.inputs[value]
        if kind == "once":
            return self.once[value]
        return self.totals[which][value] if kind == "total" else self.collected[value, which]

    def act(self, action: Action) -> list[Any]:
        stage, microbatch = self.program.stage_of(action), self.program.microbatch_of(action)
        crossing, kept = stage.sends(action.kind), stage.kept_after(action.kind)
        held = self.held.pop((action.stage, action.microbatch), {})
        self._run(stage.works[action.kind], action, microbatch, held, {*crossing, *kept})
        sent = [held[node] for node in crossing]
        if kept:
            self.held[action.stage, action.microbatch] = {n: v for n, v in held.items() if n in kept}
        return sent

    def _run(
        self, work: ActionPrograms, action: Action, microbatch: int, held: dict[fx.Node, Any], wanted: set[fx.Node]
    ) -> None:
        chain = action.stage // self.program.schedule.depth
        totals = self.totals[chain]
        in_turn = not self.ordered or all(
            self.turn.get((total, chain), 0) == action.microbatch for total in work.totals
        )
        adds = in_turn and bool(work.totals) and work.totals.keys() <= totals.keys()
        part = work.following if adds else work.first
        inputs = self._values(part.inputs, self.of_microbatch[microbatch], totals, held)
        for node in held.keys() - wanted:
            del held[node]
        made = self.run(part.program, inputs)
        ordinary = len(made) - len(work.totals)
        held.update(zip(part.outputs, made[:ordinary], strict=False))
        for node in self.program.collected.intersection(part.outputs[:ordinary]):
            self.collected[node, microbatch] = held[node]
        if adds:
            totals.update(zip(work.totals, made[ordinary:], strict=True))
            if not self.ordered:
                return  # no summand waits for its turn
        for total, value in zip(work.totals, made[ordinary:], strict=True):
            if adds:
                self.turn[total, chain] = action.microbatch + 1
            else:
                self.early.setdefault((total, chain), {})[action.microbatch] = value
            self._catch_up(work, total, chain)

    def _catch_up(self, work: ActionPrograms, total: fx.Node, chain: int) -> None:
        key, totals = (total, chain), self.totals[chain]
        early = self.early.get(key, {})
        while early and (not self.ordered or self.turn.get(key, 0) in early):
            microbatch = self.turn.get(key, 0) if self.ordered else next(iter(early))
            value, part = early.pop(microbatch), work.totals[total]
            if total in totals:
                given = {part.outputs[0]: value}
                inputs = [given[node] if node in given else totals[total] for node in part.inputs]
                (value,) = self.run(part.program, inputs)
            totals[total] = value
            self.turn[key] = microbatch + 1

    def _values(
        self, nodes: Sequence[fx.Node], own: dict[fx.Node, Any], totals: dict[fx.Node, Any], held: dict[fx.Node, Any]
    ) -> list[Any]:
        once, inputs = self.once, self.inputs
        return [
            held[node]
            if node in held
            else own[node]
            if node in own
            else once[node]
            if node in once
            else totals[node]
            if node in totals
            else inputs[node]
            for node in nodes
        ]

    def receive(self, action: Action, stage: int, values: list[Any]) -> None:
        held = self.held.setdefault((stage, action.microbatch), {})
        held.update(zip(self.program.message(action), values, strict=True))
