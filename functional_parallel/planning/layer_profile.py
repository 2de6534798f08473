"""Costs of the layers of a model, between adjacent positions where it may be cut, for the search for a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from sharding_specs import Mesh

from ..errors import PipelineError
from ..ir import info, operands_of
from ..passes import finished
from ..pipelines import OpRole, OpRoles, Stage, Subprogram, build_stages, classify_ops, finest
from ..program import Program, StorageTable, recompute_cost

__all__ = ["LayerProfile", "profile_layers"]


@dataclass(frozen=True)
class LayerProfile:
    """Costs of the ops between two adjacent positions where the model may be cut, for one microbatch."""

    work: dict[str, int]  # in flops, per kind of action: "F", "I" and "W"
    kept: dict[str, int]  # bytes of each value of a forward that the backward reads, by name
    output: int  # bytes that a cut after this layer sends
    weights: frozenset[str]  # paths of the parameters that the layer uses
    working: int  # peak bytes that are live in any of its actions, without the inputs of the action


def profile_layers(
    program: Program, virtual: str, inlined: set[fx.Node], without: Collection[str] = ()
) -> list[LayerProfile]:
    """Return the profiles of the layers of a step, in order, at the shapes of one microbatch.

    The specs of the step include the axis of microbatches, `virtual`. Its graph is consumed. `inlined` are values that
    are recomputed for every microbatch.
    """
    roles = classify_ops(program, virtual, inlined)
    cut, count = finest(program.traced, roles, program.mesh)
    builder = finished(build_stages(program, roles, cut, count, without))
    if not builder.has_backward:
        raise PipelineError(f"{program.name} has no backward to pipeline: none of its parameters is a floating tensor")
    return [_layer(each, roles, program.mesh) for each in builder.build("IW")]


def _layer(stage: Stage, roles: OpRoles, mesh: Mesh) -> LayerProfile:
    parts = {kind: stage.works[kind].first for kind in "FIW"}
    return LayerProfile(
        {kind: sum(recompute_cost(node, mesh) for node in part.program.traced.nodes) for kind, part in parts.items()},
        {node.name: info(node).aval.nbytes for node in stage.after_forward if node not in roles.backward},
        sum(info(node).aval.nbytes for node in stage.sends_forward),
        frozenset(_weights(parts.values(), roles)),
        max(_working(part.program) for part in parts.values()),
    )


def _working(program: Program) -> int:
    ledger = StorageTable(program.name, program.traced)
    return max(ledger.alive(ledger.spans), default=0)


def _weights(parts: Iterable[Subprogram], roles: OpRoles) -> set[str]:
    pending = [node for part in parts for node in part.inputs]
    found, seen = set(), set(pending)
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and info(node).is_parameter:
            found.add(info(node).param_path)
        elif roles.of.get(node) is OpRole.ONCE:
            fresh = [each for each in operands_of(node) if each not in seen]
            pending += fresh
            seen.update(fresh)
    return found
