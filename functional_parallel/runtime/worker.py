"""One rank of a pipeline in one step: what it holds, and how an action turns that into something else."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..pipelines import PipelineProgram, Work
from ..schedules import Action

__all__ = ["Worker"]


class Worker:
    """Runs a rank's actions.

    Args:
        program: the pipeline.
        rank: the rank of its axis.
        runtime: runs single programs.
        inputs: the step's inputs that this rank holds.
        ordered: whether microbatches are added up in their order, not in that of the schedule.

    Attributes:
        held: per stage and microbatch, the values that are kept: residuals, and what came from other stages.
        late: values of the epilogue.
        turn: per sum and chain, the microbatch to be added next.
        early: per sum and chain, what was there before its turn.
    """

    def __init__(
        self, program: PipelineProgram, rank: int, runtime: Any, inputs: dict[fx.Node, Any], ordered: bool
    ) -> None:
        self.ordered = ordered
        self.program, self.rank, self.runtime, self.inputs = program, rank, runtime, inputs
        self.once: dict[fx.Node, Any] = {}
        self.of_microbatch: dict[tuple[fx.Node, int], Any] = {}
        self.held: dict[tuple[int, int], dict[fx.Node, Any]] = {}
        self.totals: dict[tuple[fx.Node, int], Any] = {}
        self.collected: dict[tuple[fx.Node, int], Any] = {}
        self.late: dict[fx.Node, Any] = {}
        self.turn: dict[tuple[fx.Node, int], int] = {}
        self.early: dict[tuple[fx.Node, int], dict[int, Any]] = {}

    # --- before, and after ---

    def begin(self) -> None:
        """Run what comes before the pipeline."""
        prologue = self.program.prologues[self.rank]
        made = self.runtime.run(prologue.program, [self.inputs[node] for node in prologue.inputs])
        for (node, microbatch), value in zip(prologue.outputs, made, strict=True):
            if microbatch is None:
                self.once[node] = value
            else:
                self.of_microbatch[node, microbatch] = value

    def end(self, level: int) -> None:
        """Run a level of what comes after the pipeline."""
        part = self.program.epilogue.parts[level].get(self.rank)
        if part is not None:
            made = self.runtime.run(part.program, [self.late_value(node) for node in part.inputs])
            self.late.update(zip(part.outputs, made, strict=True))

    def late_value(self, node: fx.Node) -> Any:
        """A value of the epilogue that this rank has."""
        if node in self.late:
            return self.late[node]
        kind, value, which = self.program.epilogue.given[node]
        if kind == "input":
            return self.inputs[value]
        if kind == "once":
            return self.once[value]
        return self.totals[value, which] if kind == "total" else self.collected[value, which]

    # --- actions ---

    def act(self, action: Action) -> list[Any]:
        """Run an action; what it has for its neighbour."""
        stage, microbatch = self.program.stage_of(action), self.program.microbatch_of(action)
        crossing, kept = stage.sends(action.kind), stage.kept_after(action.kind)
        held = self.held.pop((action.stage, action.microbatch), {})
        self._run(stage.works[action.kind], action, microbatch, held, {*crossing, *kept})
        sent = [held[node] for node in crossing]
        if kept:
            self.held[action.stage, action.microbatch] = {n: v for n, v in held.items() if n in kept}
        return sent

    def _run(self, work: Work, action: Action, microbatch: int, held: dict[fx.Node, Any], wanted: set[fx.Node]) -> None:
        """Run one of the work's programs: what is not wanted afterwards dies in it, at its last use."""
        chain = action.stage // self.program.schedule.depth
        sums = [(total, chain) for total in work.totals]
        in_turn = not self.ordered or all(self.turn.get(key, 0) == action.microbatch for key in sums)
        adds = in_turn and bool(sums) and all(key in self.totals for key in sums)
        part = work.following if adds else work.first
        inputs = [self._value(node, microbatch, chain, held) for node in part.inputs]
        for node in held.keys() - wanted:
            del held[node]
        made = self.runtime.run(part.program, inputs)
        ordinary = len(made) - len(sums)
        for node, value in zip(part.outputs[:ordinary], made[:ordinary], strict=True):
            held[node] = value
            if node in self.program.collected:
                self.collected[node, microbatch] = value
        for key, value in zip(sums, made[ordinary:], strict=True):
            if adds:
                self.totals[key] = value
                self.turn[key] = action.microbatch + 1
            else:
                self.early.setdefault(key, {})[action.microbatch] = value
            self._catch_up(work, key)

    def _catch_up(self, work: Work, key: tuple[fx.Node, int]) -> None:
        """Add what was there before its turn, as far as it is its turn now."""
        early = self.early.get(key, {})
        while early and (not self.ordered or self.turn.get(key, 0) in early):
            microbatch = self.turn.get(key, 0) if self.ordered else next(iter(early))
            value, part = early.pop(microbatch), work.totals[key[0]]
            if key in self.totals:
                given = {part.outputs[0]: value}
                inputs = [given[node] if node in given else self.totals[key] for node in part.inputs]
                (value,) = self.runtime.run(part.program, inputs)
            self.totals[key] = value
            self.turn[key] = microbatch + 1

    def _value(self, node: fx.Node, microbatch: int, chain: int, held: dict[fx.Node, Any]) -> Any:
        if node in held:
            return held[node]
        if (node, microbatch) in self.of_microbatch:
            return self.of_microbatch[node, microbatch]
        if node in self.once:
            return self.once[node]
        return self.totals[node, chain] if (node, chain) in self.totals else self.inputs[node]

    # --- messages ---

    def receive(self, action: Action, stage: int, values: list[Any]) -> None:
        """Take what an action of a neighbouring stage made."""
        held = self.held.setdefault((stage, action.microbatch), {})
        held.update(zip(self.program.message(action), values, strict=True))
