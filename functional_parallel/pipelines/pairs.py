"""Forward and backward of the stages of a pipeline, for passes that rewrite both at once."""

from __future__ import annotations

from ..passes import RunningSum, Settings, Unit
from .stages import ActionPrograms, Stage
from .structure import PipelineStructure


def pairs_of(pipeline: PipelineStructure, settings: Settings) -> list[Unit]:
    """Return the programs of each stage, the forward first."""
    return [_pair(stage, settings) for stage in pipeline.stages]


def _pair(stage: Stage, settings: Settings) -> Unit:
    works = [stage.works[kind] for kind in sorted(stage.works, key="FBIW".index)]
    programs = [part.program for work in works for part in work.parts]
    return Unit(programs, settings, sums=[total for work in works for total in _sums(work)])


def _sums(work: ActionPrograms) -> list[RunningSum]:
    first, following = work.first.program, work.following.program
    places = range(len(first.traced.outputs) - len(work.totals), len(first.traced.outputs))
    return [
        RunningSum((first, place), ((following, place), (part.program, 0)))
        for place, part in zip(places, work.totals.values(), strict=True)
    ]
