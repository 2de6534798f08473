"""From a traced program to one that runs: microbatches taken out of it, its passes run, or cut into a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sharding_specs import Mesh

from ..collectives import Parts
from ..functions import Layout
from ..ir import info, simplify
from ..passes import (
    NAMES,
    Buckets,
    CheapAgain,
    InPlace,
    LookingAhead,
    Marked,
    ProgramPass,
    Reductions,
    SumsOnce,
    Turned,
    end_one_microbatch,
    fold_layers,
    fuse_views,
    run_passes,
    unroll,
)
from ..pipelines import PipelineError, PipelineProgram, add_in_place, build
from ..program import Program, keep_phases

__all__ = ["Watch", "rewrite"]

Watch = Callable[[str, Program, Mesh], None]


def rewrite(
    program: Program,
    layout: Layout,
    parts: Mapping[str, Parts],
    bucket: int | str | None,
    donated: bool,
    without: Collection[str],
    watch: Watch,
) -> Program | PipelineProgram:
    """Take the virtual axes out of a program, and run the passes that its transforms ask for.

    Args:
        program: as traced, at the shapes of one microbatch.
        layout: of the function that it came from.
        parts: per virtual axis, into which microbatches it cuts.
        bucket, without: as for `compile`.
        donated: whether inputs are given up to be written into.
        watch: called with the name of each rewrite after it, the program, and the mesh with its virtual axes.

    Raises:
        ValueError: when `without` names a rewrite that there is not.
    """
    wide = layout.mesh(program.mesh)
    unknown = sorted(set(without) - NAMES - {each.name for each in layout.passes})
    if unknown:
        raise ValueError(f"without={unknown}: no such rewrites; there are {', '.join(map(repr, sorted(NAMES)))}")
    keep_phases(program.traced)
    watch("traced", program, wide)
    first: list[ProgramPass] = [SumsOnce(axis) for axis, cut in parts.items() if cut.ranks > 1]
    first += [each for each in layout.passes if each.order < 0]
    early, _ = run_passes(first, program.traced, program.mesh, without, lambda name: watch(name, program, wide))
    program.passes = early
    if layout.pipeline is not None:
        return _pipelined(program, layout, parts[layout.pipeline.virtual], bucket, without, watch)
    for axis, cut in parts.items():
        if cut.ranks > 1:
            anew = {node for each in layout.passes for node in each.per_microbatch(program.traced)}
            program.traced = unroll(program.traced, axis, cut, program.in_specs, program.out_specs, anew)
        program.in_specs = [spec.without({axis}) for spec in program.in_specs]
        program.out_specs = [spec.without({axis}) for spec in program.out_specs]
        watch("microbatches", program, wide)
    late = [each for each in layout.passes if each.order >= 0]
    passes = [
        Marked(),
        Turned(),
        Reductions(),
        *late,
        CheapAgain(),
        *_buckets(bucket),
        *([InPlace()] if donated else []),
    ]
    later, program.notes = run_passes(
        passes, program.traced, program.mesh, without, lambda name: watch(name, program, program.mesh)
    )
    program.passes = early + later
    fuse_views(program.traced)
    watch("views", program, program.mesh)
    return program


def _pipelined(
    program: Program,
    layout: Layout,
    parts: Parts,
    bucket: int | str | None,
    without: Collection[str],
    watch: Watch,
) -> PipelineProgram:
    """Cut a program into a pipeline: first what is recomputed and gathered when, last how sums are batched."""
    plan, wide = layout.pipeline, layout.mesh(program.mesh)
    if any(isinstance(each, LookingAhead) for each in layout.passes):
        raise PipelineError(
            "fp.remat(budget=…) looks for the peak of a whole step, and a pipeline's ranks reach theirs one by one: "
            "choose what is recomputed, as fp.remat('layers') or fp.remat('attention')"
        )
    if parts.ranks == 1:
        end_one_microbatch(program.traced, plan.virtual, program.in_specs, program.out_specs)
    fold_layers(program.traced)
    simplify(program.traced)
    late = [Marked(), Turned(), *(each for each in layout.passes if each.order >= 0)]
    later, _ = run_passes(late, program.traced, program.mesh, without, lambda name: watch(name, program, wide))
    program.passes += later
    inlined = {node for each in layout.passes for node in each.per_microbatch(program.traced)}
    if plan.measure is not None:
        return plan.measure(program, plan.virtual, inlined, without)

    def finish(part: Program) -> None:
        part.backend = program.backend
        watch("cut", part, part.mesh)
        donated = any(info(node).donated for node in part.traced.inputs)
        passes: list[ProgramPass] = [Reductions(), *_buckets(bucket), *([InPlace()] if donated else [])]
        part.passes, _ = run_passes(passes, part.traced, part.mesh, without, lambda name: watch(name, part, part.mesh))
        fuse_views(part.traced)
        watch("views", part, part.mesh)

    result = build(program, plan, parts, inlined, finish, without, lambda name: watch(name, program, wide))
    for work in (work for stage in result.stages for work in stage.works.values() if InPlace.name not in without):
        for part in add_in_place(work):
            part.passes += (InPlace.name,)
            watch(InPlace.name, part, part.mesh)
    result.passes += tuple(dict.fromkeys(name for part, _ in result.programs() for name in part.passes))
    return result


def _buckets(size: int | str | None) -> list[Buckets]:
    return [] if size is None else [Buckets(size)]
