"""Rewrite a traced program: run the passes of the table, and cut it into a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..passes import Completed, ProgramPass, Scope, Settings, Unit, passes_of, run_pass
from ..pipelines import PipelineProgram, PipelineRequest, build, pairs_of, stages_of
from ..program import Program, Watch
from ..schedules import peaks


@dataclass(frozen=True)
class Rewrite:
    """Passes of a step, in order, with the request of a pipeline that the step is cut into."""

    settings: Settings
    pipeline: PipelineRequest | None = None
    watch: Watch | None = None  # told of the program after each pass

    def run(self, program: Program) -> Program | PipelineProgram:
        """Run the passes. They consume the program."""
        passes = passes_of(self.settings)
        self._tell("traced", program)
        self._on_step(program, passes)
        return program if self.pipeline is None else self._cut(program, self.pipeline, passes)

    def on_step(self, program: Program) -> None:
        """Run the passes that precede the cut into stages, and no others."""
        self._on_step(program, passes_of(self.settings))

    def _on_step(self, program: Program, passes: Sequence[ProgramPass]) -> None:
        chosen = [each for each in passes if self.pipeline is None or each.scope is Scope.STEP]
        trial = replace(self, watch=None)
        for index, each in enumerate(chosen):
            later = [other for other in chosen[index + 1 :] if other.affects_memory]
            unit = Unit([program], self.settings, rest=functools.partial(trial._on_step, passes=later))
            if self.pipeline is not None:
                unit.complete = functools.partial(trial._completed, plan=self.pipeline, passes=passes)
            run_pass(each, unit, self.watch)

    def _completed(self, program: Program, plan: PipelineRequest, passes: Sequence[ProgramPass]) -> Completed:
        result = self._cut(program, plan, passes)
        rows = [{result.stage_of(action).index for action in row} for row in result.schedule.actions]
        saved = [{node for index in row for node in result.stages[index].after_forward} for row in rows]
        sent = {node for stage in result.stages for node in stage.sends_forward}
        return Completed(result.memory().ranks, tuple(saved), peaks(result.schedule), sent)

    def _cut(self, program: Program, plan: PipelineRequest, passes: Sequence[ProgramPass]) -> PipelineProgram:
        staged = stages_of(program, plan, self.settings.per_microbatch(program.traced))
        for each in passes:
            if each.scope is Scope.STAGED:
                run_pass(each, staged.unit(self.settings), self.watch)
        result = build(staged, plan, self.settings.splits[plan.virtual])
        parts = [Unit([part], self.settings) for part in result.every_program()]
        for part in parts:
            part.program.backend = self.settings.options.backend
            self._tell("cut", part.program)
        units = {Scope.STAGE: parts, Scope.PAIR: pairs_of(result, self.settings)}
        for each in passes:
            for unit in units.get(each.scope, ()):
                run_pass(each, unit, self.watch)
        result.passes += tuple(dict.fromkeys(name for part in parts for name in part.program.passes))
        result.notes += tuple(dict.fromkeys(note for part in parts for note in part.program.notes))
        result.forget_ops()
        return result

    def _tell(self, name: str, program: Program) -> None:
        if self.watch is not None:
            self.watch(name, program, self.settings.mesh)
