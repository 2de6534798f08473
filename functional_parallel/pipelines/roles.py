"""Roles of the ops of a step in a pipeline.

A step over microbatches is one graph with the shapes of one microbatch. The sums over microbatches are explicit ops.
Each op has one of these roles:

- ONCE: the op does not depend on the microbatch. It runs once per step, on each rank that needs it.
- EARLY: a sum over all microbatches needs the op before any backward can begin, for example the count of a loss's
  targets. It runs before the pipeline fills.
- LOCAL: the op depends on the batch only, for example a mask. It runs next to its users, on any rank.
- STAGED: the op belongs to a stage, in its forward or backward. This is the role of all other ops.
- TOTAL: a sum over microbatches, accumulated on the rank that computes its operands.
- AFTER: the op depends on such a sum, like the optimizer's update, and runs after the pipeline has drained. A sum with
  the same summand from every microbatch also has this role.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum

from torch import fx

from sharding_specs import P

from ..errors import PipelineError
from ..ir import Traced, first_operand, info, operands_of, primitive_name, reached, source_of
from ..passes import MicrobatchRounds, names_axis
from ..program import view_base
from ..rules import lookup


class OpRole(Enum):
    ONCE = "once"
    EARLY = "early"
    LOCAL = "local"
    STAGED = "staged"
    TOTAL = "total"
    AFTER = "after"


class OpRoles:
    """Roles of all ops of a step, in `of`.

    `varying` are the values that differ by microbatch, `backward` the staged ops of the backward, `totals` the sums
    over microbatches that end the pipeline, in order. `late` are the sums before the pipeline fills, and the values
    that depend on them.
    """

    def __init__(self, traced: Traced, axis: str, in_specs: list[P], inlined: set[fx.Node]) -> None:
        self.traced, self.axis, self.inlined = traced, axis, inlined
        self.rounds = MicrobatchRounds(traced, axis, in_specs)
        self.varying = {node for node, spec in zip(traced.inputs, in_specs, strict=True) if axis in spec.axes}
        self.on_parameters = {node for node in traced.inputs if info(node).is_parameter}
        self.backward: set[fx.Node] = set()
        self.late: set[fx.Node] = set()
        self.of: dict[fx.Node, OpRole] = {}
        for node in traced.nodes:
            self._classify(node)
        self.totals = [node for node, role in self.of.items() if role is OpRole.TOTAL]
        self._check_early()

    def _classify(self, node: fx.Node) -> None:
        operands = operands_of(node)
        barrier = self.rounds.is_barrier(node)
        for marked in (self.on_parameters, self.late):
            if any(operand in marked for operand in operands):
                marked.add(node)
        if info(node).backward or any(operand in self.backward for operand in operands):
            self.backward.add(node)
        shared = barrier and primitive_name(node) != "psum_scatter"  # psum_scatter: each gets a slice
        if not shared and (self._begins(node) or any(operand in self.varying for operand in operands)):
            self.varying.add(node)
        self.of[node] = self._role(node, operands, barrier)
        if barrier and self.of[node] is OpRole.EARLY:
            self.late.add(node)

    def _begins(self, node: fx.Node) -> bool:
        return primitive_name(node) in ("axis_index", "pscatter") and names_axis(node, self.axis)

    def _role(self, node: fx.Node, operands: list[fx.Node], barrier: bool) -> OpRole:
        in_last_round = self.rounds.of[node] >= self.rounds.last
        if barrier and node in self.backward and primitive_name(node) == "psum" and operands[0] not in self.varying:
            return OpRole.AFTER  # every microbatch adds the same summand, as in the bias gradient of a linear function
        if barrier:
            made = operands[0] in self.varying and operands[0].op != "placeholder"  # not a step input
            return OpRole.TOTAL if in_last_round and made else OpRole.EARLY
        if node not in self.varying:
            after = any(self.of.get(operand) in (OpRole.TOTAL, OpRole.AFTER) for operand in operands)
            return OpRole.AFTER if after else OpRole.ONCE
        if self._begins(node) or not in_last_round:
            return OpRole.EARLY
        return OpRole.STAGED if node in self.on_parameters or node in self.backward else OpRole.LOCAL

    def _check_early(self) -> None:
        early = [node for node, role in self.of.items() if role is OpRole.EARLY and node in self.on_parameters]
        # A slice of a value that is computed once per step does not wait for other microbatches.
        found = [
            n for n in early if primitive_name(n) != "pscatter" or self.of.get(first_operand(n)) is not OpRole.ONCE
        ]
        if not found:
            return
        barrier = next((node for node in found if self.rounds.is_barrier(node)), found[-1])
        leads_to_backward = any(each in self.backward for each in reached(barrier.users, operator.attrgetter("users")))
        why = _why_all(barrier, leads_to_backward) + self._no_batch(barrier)
        raise PipelineError(f"{info(barrier).source}: {why}")

    def _no_batch(self, barrier: fx.Node) -> str:
        """Return advice if only some batch arguments are gathered: they may not hold samples and must not be cut."""
        batch = [node for node in self.traced.inputs if node in self.varying]
        below = reached([barrier], operands_of)
        gathered = [node for node in batch if node in below]
        if primitive_name(barrier) != "all_gather" or not gathered or len(gathered) == len(batch):
            return ""
        paths = " and ".join(str(info(node).path or node.name) for node in gathered)
        return f". It is computed of {paths}: if that has no samples, say with batch= that it is not to be cut"

    def parameters_of(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the parameters that values are, or are computed from by ops that run once per step, like casts."""
        found = reached(values, lambda value: operands_of(value) if self.of.get(value) is OpRole.ONCE else [])
        return [value for value in found if value.op == "placeholder" and info(value).is_parameter]

    def is_inline(self, node: fx.Node) -> bool:
        """Whether an op is repeated in each program that needs it, because it is free or must not be saved."""
        role = self.of.get(node)
        if role is OpRole.LOCAL:  # also if it depends on early sums, which are inputs
            return True
        if role is OpRole.EARLY:
            return node not in self.late and not self._begins(node)
        if role is not OpRole.ONCE:
            return False
        if node in self.inlined or info(node).recomputed:
            return True
        return not operands_of(node) or view_base(node) is not None

    def scope(self, node: fx.Node) -> str:
        """Return the origin of a value that a stage reads: "input", "once" per step, "microbatch" or "stage"."""
        if self.of.get(node) in (OpRole.STAGED, OpRole.LOCAL):
            return "stage"
        if node in self.varying:
            return "microbatch"
        return "input" if node.op == "placeholder" else "once"


def _why_all(barrier: fx.Node, wanted: bool) -> str:
    op = _meant(barrier)
    fix = (
        "normalise within groups of a microbatch's samples, by fp.functional(module, buffers=True, groups=(ranks, "
        "microbatches)) or x.unflatten(0, (groups, -1)), or use fp.accumulate"
    )
    if primitive_name(barrier) == "all_gather" and lookup(op.target) is None and not info(op).backward:
        fix = f"it has no sharding rule: give it one with fp.register_rule({op.target}, '… -> …'), or use fp.accumulate"
    elif not wanted:
        detached = "take it of x.detach(), or " if primitive_name(barrier) in ("pmax", "pmin") else ""
        fix = (
            f"no gradient needs it: {detached}return what it is computed of, per sample, and compute it there; or "
            "fp.accumulate"
        )
    return (
        f"{op.target} needs all microbatches before the backward of any can begin, so a pipeline cannot stream them "
        f"(batch norm over the whole batch does this, or a loss divided by what the model computes); {fix}"
    )


def _meant(barrier: fx.Node) -> fx.Node:
    if primitive_name(barrier) != "all_gather":
        return next((node for node in reached([barrier], operands_of) if _is_of_user(node)), barrier)
    near = [
        node for node in reached(barrier.users, operator.attrgetter("users")) if source_of(node) == source_of(barrier)
    ]
    forward = [node for node in near if _is_of_user(node) and not info(node).backward]
    without = (node for node in forward if lookup(node.target) is None)
    return next(without, next(iter(forward), next(filter(_is_of_user, near), barrier)))


def _is_of_user(node: fx.Node) -> bool:
    return node.op == "call_function" and primitive_name(node) is None and node.target is not operator.getitem
