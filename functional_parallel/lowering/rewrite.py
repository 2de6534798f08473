"""Rewrite a traced program: unroll its microbatches, run its passes, or cut it into a pipeline."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from sharding_specs import Mesh

from ..collectives import DimSplit
from ..errors import PipelineError
from ..functions import Layout
from ..ir import info, simplify
from ..passes import (
    PASS_NAMES,
    Buckets,
    EarlyReductions,
    InPlaceUpdates,
    LookaheadPass,
    Phase,
    ProgramPass,
    RecomputeCheap,
    RecomputeMarked,
    ReduceOncePerStep,
    TransposedGradients,
    fold_layers,
    fuse_views,
    place_single_microbatch_sums,
    run_passes,
    sorted_passes,
    split_at,
    unroll,
)
from ..pipelines import PipelineProgram, accumulate_in_place, build, pipeline_of
from ..program import UNCUT, Intermediate, Program, keep_phases
from ..requests import PairPass, Scope, requested_passes

T = TypeVar("T")
Programs = Generator[Intermediate, None, T]


@dataclass(frozen=True)
class Options:
    """Options of the user that do not change the meaning of the program."""

    bucket: int | str | None = None  # bytes per collective; "auto" selects a size; None does not combine collectives
    without: frozenset[str] = frozenset()  # names of the passes that are disabled
    backend: str = "eager"  # executor of the ops between collectives: "eager" or "inductor"
    donate: bool = False  # whether the program may write into the memory of the state
    reduction: str = "fast"  # "fast" for sums in any order, "ordered" for sums in rank order


def rewrite(
    program: Program, layout: Layout, parts: Mapping[str, DimSplit], options: Options
) -> Programs[Program | PipelineProgram]:
    """Remove the virtual axes of a program at the shapes of one microbatch, and run the requested passes.

    Yield the program after each pass, and return the final one. `parts` is the split of each virtual axis.
    """
    wide = layout.mesh(program.mesh)
    unknown = sorted(options.without - PASS_NAMES - {each.name for each in requested_passes(layout)})
    if unknown:
        raise ValueError(f"without={unknown}: no such rewrites; there are {', '.join(map(repr, sorted(PASS_NAMES)))}")
    keep_phases(program.traced)
    yield Intermediate("traced", program, wide)
    first: list[ProgramPass] = [ReduceOncePerStep(axis) for axis, cut in parts.items() if cut.ranks > 1]
    pipeline = pipeline_of(layout)
    scopes = () if pipeline is None else (Scope.STEP,)
    early, late = split_at(Phase.RECOMPUTE, requested_passes(layout, *scopes))
    program.passes, _ = yield from _passed(program, [*first, *early], wide, options)
    if pipeline is not None:
        return (yield from _pipelined(program, layout, parts[pipeline.virtual], options))
    for axis, cut in parts.items():
        if cut.ranks > 1:
            anew = _per_microbatch(program, layout)
            program.traced = unroll(program.traced, axis, cut, program.in_specs, program.out_specs, anew)
        program.in_specs = [spec.without({axis}) for spec in program.in_specs]
        program.out_specs = [spec.without({axis}) for spec in program.out_specs]
        yield Intermediate("microbatches", program, wide)
    passes = [
        RecomputeMarked(),
        TransposedGradients(),
        EarlyReductions(),
        *late,
        RecomputeCheap(),
        *_last(options, options.donate),
    ]
    later, program.notes = yield from _passed(program, passes, program.mesh, options)
    program.passes += later
    fuse_views(program.traced)
    yield Intermediate("views", program, program.mesh)
    return program


def _pipelined(program: Program, layout: Layout, parts: DimSplit, options: Options) -> Programs[PipelineProgram]:
    """Cut a program into a pipeline.

    The passes that decide on recomputation and gathers run before the cut; those that batch sums run after it.
    """
    plan, wide, requested = pipeline_of(layout), layout.mesh(program.mesh), requested_passes(layout)
    assert plan is not None
    if any(isinstance(each, LookaheadPass) for each in requested):
        raise PipelineError(
            "fp.remat(budget=…) looks for the peak of a whole step, and a pipeline's ranks reach theirs one by one: "
            "choose what is recomputed, as fp.remat('layers') or fp.remat('attention')"
        )
    if parts.ranks == 1:
        place_single_microbatch_sums(program.traced, plan.virtual, program.in_specs, program.out_specs)
    fold_layers(program.traced)
    simplify(program.traced)
    _, late = split_at(Phase.RECOMPUTE, requested_passes(layout, Scope.STEP))
    later, _ = yield from _passed(program, [RecomputeMarked(), TransposedGradients(), *late], wide, options)
    program.passes += later
    inlined = _per_microbatch(program, layout)
    yield Intermediate(UNCUT, program, wide, inlined)
    names = build(program, plan, parts, inlined, options.without)
    result = yield from _each(names, program, wide)
    of_parts = requested_passes(layout, Scope.STAGE)
    for part in list(result.every_program()):
        yield from _finished_part(part, program.backend, of_parts, options)
    yield from _paired(result, layout, options)
    result.forget_ops()
    for work in (work for stage in result.stages for work in stage.works.values()):
        for part in accumulate_in_place(work) if InPlaceUpdates.name not in options.without else ():
            part.passes += (InPlaceUpdates.name,)
            yield Intermediate(InPlaceUpdates.name, part, part.mesh)
    result.passes += tuple(dict.fromkeys(name for part, _ in result.programs() for name in part.passes))
    return result


def _paired(pipeline: PipelineProgram, layout: Layout, options: Options) -> Programs[None]:
    """Run the requested passes over forward and backward of each stage."""
    chosen = {each: None for each in requested_passes(layout, Scope.PAIR) if each.name not in options.without}
    for each in sorted_passes(chosen):
        if not isinstance(each, PairPass):
            raise TypeError(f"the pass {each.name!r} is requested for pairs of programs, so it must be a PairPass")
        for stage in pipeline.stages:
            works = [stage.works[kind] for kind in sorted(stage.works, key="FBIW".index)]
            parts = [part.program for work in works for part in work.parts]
            each.run_pair([part.traced for part in parts], pipeline.mesh)
            for part in parts:
                part.traced.seal()
                part.passes += (each.name,)
                yield Intermediate(each.name, part, part.mesh)


def _finished_part(part: Program, backend: str, requested: Sequence[ProgramPass], options: Options) -> Programs[None]:
    """Run the last passes on one program of a pipeline."""
    part.backend = backend
    yield Intermediate("cut", part, part.mesh)
    donated = any(info(node).donated for node in part.traced.inputs)
    part.passes, _ = yield from _passed(
        part, [EarlyReductions(), *requested, *_last(options, donated)], part.mesh, options
    )
    fuse_views(part.traced)
    yield Intermediate("views", part, part.mesh)


def _passed(
    program: Program, passes: Sequence[ProgramPass], mesh: Mesh, options: Options
) -> Programs[tuple[tuple[str, ...], tuple[str, ...]]]:
    names = run_passes(sorted_passes(passes), program.traced, program.mesh, options.without)
    return (yield from _each(names, program, mesh))


def _each(names: Generator[str, None, T], program: Program, mesh: Mesh) -> Programs[T]:
    """Yield a program after each step of a generator that changes it."""
    while True:
        try:
            name = next(names)
        except StopIteration as end:
            result: T = end.value
            return result
        yield Intermediate(name, program, mesh)


def _per_microbatch(program: Program, layout: Layout) -> set[fx.Node]:
    return {node for each in requested_passes(layout) for node in each.per_microbatch(program.traced)}


def _last(options: Options, donated: bool) -> list[ProgramPass]:
    buckets: list[ProgramPass] = [] if options.bucket is None else [Buckets(options.bucket)]
    return [*buckets, InPlaceUpdates()] if donated else buckets
