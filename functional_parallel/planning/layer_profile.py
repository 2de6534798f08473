"""Costs of the layers of a model, between adjacent positions where it may be cut, for the search for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from ..collectives import MICROBATCH
from ..errors import PipelineError
from ..ir import info
from ..passes import RecomputeCheap, Settings, run_pass
from ..pipelines import finest_stages
from ..program import Program, StorageTable, recompute_cost
from ..schedules import Layer


def profile_layers(
    program: Program, settings: Settings, samples: int, speed: float, weights: Mapping[str, tuple[int, int]]
) -> tuple[list[Layer], float]:
    """Return the costs of the layers of a step, and the sum of the bytes per sample that they work with."""
    staged = finest_stages(program, MICROBATCH, settings.per_microbatch(program.traced))
    run_pass(RecomputeCheap(), staged.unit(settings))
    builder, roles = staged.builder(), staged.roles
    if not builder.has_backward:
        raise PipelineError(f"{program.name} has no backward to pipeline: none of its parameters is a floating tensor")
    layers, working = [], 0
    for stage in builder.build("IW"):
        parts = [stage.works[kind].first for kind in "FIW"]
        used = roles.parameters_of(node for part in parts for node in part.inputs)
        forward, inputs, weight = (_work(part.program) / samples / speed for part in parts)
        kept = {node.name: info(node).nbytes / samples for node in stage.after_forward if node not in roles.backward}
        output = sum(info(node).nbytes for node in stage.sends_forward) / samples
        own = {path: weights[path] for node in used if (path := info(node).param_path) in weights}
        layers.append(Layer(forward, inputs, weight, output=output, kept=kept, weights=own))
        working += max(_working(part.program) for part in parts)
    return layers, working / samples


def _work(program: Program) -> int:
    return sum(recompute_cost(node, program.mesh) for node in program.traced.nodes)


def _working(program: Program) -> int:
    ledger = StorageTable(program.name, program.traced)
    return max(ledger.alive(ledger.spans), default=0)
