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

    Attributes:
        held: per stage and microbatch, the values that are kept: residuals, and what came from other stages.
        outgoing: per action, what is yet to be sent.
        expected: per action, the message under way that brings what it made.
        late: values of the epilogue.
    """

    def __init__(self, program: PipelineProgram, rank: int, runtime: Any, inputs: dict[fx.Node, Any]) -> None:
        self.program, self.rank, self.runtime, self.inputs = program, rank, runtime, inputs
        self.once: dict[fx.Node, Any] = {}
        self.of_microbatch: dict[tuple[fx.Node, int], Any] = {}
        self.held: dict[tuple[int, int], dict[fx.Node, Any]] = {}
        self.totals: dict[tuple[fx.Node, int], Any] = {}
        self.collected: dict[tuple[fx.Node, int], Any] = {}
        self.outgoing: dict[Action, list[Any]] = {}
        self.expected: dict[Action, Any] = {}
        self.late: dict[fx.Node, Any] = {}

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
        held = self.held.setdefault((action.stage, action.microbatch), {})
        self._run(stage.works[action.kind], action, microbatch, held)
        if action.kind == "W":
            self.held.pop((action.stage, action.microbatch))
            return []
        crossing = stage.sends_forward if action.kind == "F" else stage.sends_backward
        sent = [held[node] for node in crossing]
        if action.kind == "B" or (action.kind == "F" and not stage.after_forward):
            self.held.pop((action.stage, action.microbatch))
        else:
            kept = stage.after_forward if action.kind == "F" else stage.after_input
            self.held[action.stage, action.microbatch] = {n: v for n, v in held.items() if n in kept}
        return sent

    def _run(self, work: Work, action: Action, microbatch: int, held: dict[fx.Node, Any]) -> None:
        chain = action.stage // self.program.schedule.depth
        begun = bool(work.totals) and (work.totals[0][0], chain) in self.totals
        part = work.following if begun else work.first
        inputs = [self._value(node, microbatch, chain, held) for node in part.inputs]
        made = self.runtime.run(part.program, inputs)
        ordinary = len(made) - len(work.totals)
        for node, value in zip(part.outputs[:ordinary], made[:ordinary], strict=True):
            held[node] = value
            if node in self.program.collected:
                self.collected[node, microbatch] = value
        for (total, _), value in zip(work.totals, made[ordinary:], strict=True):
            self.totals[total, chain] = value

    def _value(self, node: fx.Node, microbatch: int, chain: int, held: dict[fx.Node, Any]) -> Any:
        if node in held:
            return held[node]
        if (node, microbatch) in self.of_microbatch:
            return self.of_microbatch[node, microbatch]
        if node in self.once:
            return self.once[node]
        return self.totals[node, chain] if (node, chain) in self.totals else self.inputs[node]

    # --- messages ---

    def target(self, action: Action) -> int | None:
        """The stage that takes what an action makes."""
        if action.kind == "W":
            return None
        schedule = self.program.schedule
        return schedule.after(action.stage) if action.kind == "F" else schedule.before(action.stage)

    def message(self, action: Action) -> tuple[fx.Node, ...]:
        """What travels after an action."""
        stage = self.program.stage_of(action)
        return stage.sends_forward if action.kind == "F" else stage.sends_backward

    def receive(self, action: Action, stage: int, values: list[Any]) -> None:
        """Take what an action of a neighbouring stage made."""
        held = self.held.setdefault((stage, action.microbatch), {})
        held.update(zip(self.message(action), values, strict=True))

    def awaited(self, action: Action) -> list[Action]:
        """The actions of neighbouring stages that an action may wait for."""
        schedule = self.program.schedule
        if action.kind == "F":
            before = schedule.before(action.stage)
            return [] if before is None else [Action("F", before, action.microbatch)]
        after = schedule.after(action.stage)
        if action.kind == "W" or after is None:
            return []
        return [Action(kind, after, action.microbatch) for kind in "BI"]
