"""Forward and backward of the stages of a pipeline, for passes that rewrite both at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from sharding_specs import P

from ..collectives import State
from ..ir import Traced, info, set_info
from ..ops import TO_MEMORY
from ..passes import Chosen, Pack, RunningSum, Settings, Unit, Unpack, call_inline, next_op, on_device, restore
from .extract import Subprogram
from .stages import ActionPrograms, Stage
from .structure import PipelineStructure


def pairs_of(pipeline: PipelineStructure, settings: Settings) -> list[Unit]:
    return [_pair(pipeline, stage, settings) for stage in pipeline.stages]


def _pair(pipeline: PipelineStructure, stage: Stage, settings: Settings) -> Unit:
    works = [stage.works[kind] for kind in sorted(stage.works, key="FBIW".index)]
    programs = list(dict.fromkeys(part.program for work in works for part in work.parts))
    sums = [total for work in works for total in _sums(work)]
    return Unit(programs, settings, exchange=functools.partial(_exchange, pipeline, stage.index), sums=sums)


def _sums(work: ActionPrograms) -> list[RunningSum]:
    first, following = work.first.program, work.following.program
    places = range(len(first.traced.outputs) - len(work.totals), len(first.traced.outputs))
    return [
        RunningSum((first, place), ((following, place), (part.program, 0)))
        for place, part in zip(places, work.totals.values(), strict=True)
    ]


def _exchange(
    pipeline: PipelineStructure,
    index: int,
    chosen: Chosen,
    pack: Pack,
    unpack: Unpack,
) -> Sequence[fx.Node]:
    stage = pipeline.stages[index]
    stored = chosen(_residuals(pipeline, stage), pipeline.mesh)
    for value in stored:
        leaves = value in stage.sends_forward or value in pipeline.collected
        names: list[fx.Node] = []
        packed = functools.partial(_packed, value=value, pack=pack, names=names, leaves=leaves)
        unpacked = functools.partial(_unpacked, value=value, unpack=unpack, names=names)
        for kind, work in stage.works.items():
            if kind == "F" or value in work.first.inputs:
                stage.works[kind] = _mapped(work, packed if kind == "F" else unpacked)
        stage = replace(
            stage,
            after_forward=stage.after_forward - {value} | set(names),
            after_input=stage.after_input - {value} | set(names) if value in stage.after_input else stage.after_input,
        )
    pipeline.stages[index] = stage
    return stored


def _residuals(pipeline: PipelineStructure, stage: Stage) -> list[fx.Node]:
    forward, works = stage.works["F"].first, stage.works.items()
    received = pipeline.stages[stage.index - 1].sends_forward if stage.index else ()
    there = {*forward.inputs, *forward.outputs, *received}
    read = {value for kind, work in works if kind != "F" for value in work.first.inputs}
    found = sorted(stage.after_forward & there & read, key=lambda value: value.name)
    return on_device(found, Traced(found[0].graph)) if found else []


def _mapped(work: ActionPrograms, change: Callable[..., Subprogram]) -> ActionPrograms:
    first = change(work.first, sums=len(work.totals))
    following = first if work.following is work.first else change(work.following, sums=len(work.totals))
    return replace(work, first=first, following=following)


def _packed(
    part: Subprogram,
    sums: int,
    value: fx.Node,
    pack: Pack,
    names: list[fx.Node],
    leaves: bool,
) -> Subprogram:
    """Let a forward return the parts of a value, instead of the value unless it leaves the stage too."""
    program, outputs = part.program, list(part.outputs)
    traced = program.traced
    if value in outputs:
        here = traced.outputs[outputs.index(value)]
    else:
        part = part if value in part.inputs else _with_input(part, value)
        here = traced.inputs[part.inputs.index(value)]
    with traced.graph.inserting_before(next_op(here if here.op == "call_function" else traced.inputs[-1])):
        parts = call_inline(traced, pack, [here], program.mesh, info(here))
    if not names:  # the names of the parts, equal in all programs
        names += [_name(value, each) for each in parts]
    if value in outputs and not leaves:
        place = outputs.index(value)
        for each in (outputs, traced.outputs, program.out_specs, program.out_paths):
            del each[place]
    place = len(traced.outputs) - sums
    outputs[place:place] = names
    traced.outputs[place:place] = parts
    program.out_specs[place:place] = map(_spec, parts)
    program.out_paths[place:place] = [name.name for name in names]
    return replace(part, outputs=tuple(outputs))


def _unpacked(part: Subprogram, sums: int, value: fx.Node, unpack: Unpack, names: Sequence[fx.Node]) -> Subprogram:
    program, traced = part.program, part.program.traced
    place = part.inputs.index(value)
    here = traced.inputs[place]
    for name in names:
        part = _with_input(part, name)
    position = {node: number for number, node in enumerate(traced.graph.nodes)}
    readers = sorted((user for user in here.users if user.op != "output"), key=position.__getitem__)
    restore(traced, unpack, here, traced.inputs[-len(names) :], readers, program.mesh)
    for each in (traced.inputs, program.in_specs, program.in_paths):
        del each[place]
    traced.seal()
    traced.graph.erase_node(here)
    return replace(part, inputs=(*part.inputs[:place], *part.inputs[place + 1 :]))


def _with_input(part: Subprogram, name: fx.Node) -> Subprogram:
    program, traced = part.program, part.program.traced
    with traced.graph.inserting_after(traced.inputs[-1]) if traced.inputs else traced.graph.inserting_before():
        new = traced.graph.placeholder(name.name)
    set_info(new, info(name))
    traced.inputs.append(new)
    program.in_specs.append(_spec(new))
    program.in_paths.append(name.name)
    return replace(part, inputs=(*part.inputs, name))


def _name(value: fx.Node, part: fx.Node) -> fx.Node:
    with value.graph.inserting_after(value):
        name = value.graph.create_node(
            "call_function", part.target, (value, *part.args[1:]), name=f"{value.name}_stored"
        )
    set_info(name, info(part) if part.target is not TO_MEMORY else info(part)._replace(spec=P(memory=part.args[1])))
    return name


def _spec(node: fx.Node) -> P:
    return P(unreduced={axis for axis, state in info(node).typed.items() if state is not State.INVARIANT})
