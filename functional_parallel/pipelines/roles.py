"""What part each op of a step plays in a pipeline.

A step over microbatches is one graph, at the shapes of one microbatch, with the sums over microbatches written in. Of
its ops

- those that do not depend on the microbatch run once per step, on whatever rank needs them (ONCE);
- those that a sum over all microbatches needs before any backward can begin, such as the count of a loss's targets, run
  before the pipeline fills (EARLY);
- those that depend on the batch alone, such as masks, run beside their use, on any rank (LOCAL);
- the others belong to a stage (STAGED), forward or backward;
- sums over microbatches add up where their operands are made (TOTAL);
- what follows from such sums, as the optimizer's update, runs after the pipeline has drained (AFTER), and so do sums
  to which every microbatch brings the same.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from torch import fx

from sharding_specs import P

from ..ir import Traced, info, operands_of, primitive_name, source_of
from ..passes import MicrobatchRounds, names_axis
from ..program import view_base
from ..rules import lookup

__all__ = ["OpRole", "OpRoles", "PipelineError", "is_view"]


class PipelineError(ValueError):
    """A function that cannot be cut into the stages of a pipeline, or a pipeline that does not fit it."""


class OpRole(Enum):
    """The part that an op plays; see the module."""

    ONCE = "once"
    EARLY = "early"
    LOCAL = "local"
    STAGED = "staged"
    TOTAL = "total"
    AFTER = "after"


class OpRoles:
    """The role of every op.

    Attributes:
        of: per op its role.
        varying: the values that differ by microbatch.
        backward: the staged ops that belong to the backward.
        totals: the sums over microbatches that end the pipeline, in order.
        late: what follows from a sum over microbatches before the pipeline fills.
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
        shared = barrier and primitive_name(node) != "psum_scatter"  # of which every microbatch gets a part
        if not shared and (self._begins(node) or any(operand in self.varying for operand in operands)):
            self.varying.add(node)
        self.of[node] = self._role(node, operands, barrier)
        if barrier and self.of[node] is OpRole.EARLY:
            self.late.add(node)

    def _begins(self, node: fx.Node) -> bool:
        """Whether the op's result differs by microbatch though its operands do not."""
        return primitive_name(node) in ("axis_index", "pscatter") and names_axis(node, self.axis)

    def _role(self, node: fx.Node, operands: list[fx.Node], barrier: bool) -> OpRole:
        in_last_round = self.rounds.of[node] >= self.rounds.last
        if barrier and node in self.backward and self._sums_alike(node):
            return OpRole.AFTER
        if barrier:
            made = node.args[0] in self.varying and node.args[0].op != "placeholder"  # not the batch as it is
            return OpRole.TOTAL if in_last_round and made else OpRole.EARLY
        if node not in self.varying:
            after = any(self.of.get(operand) in (OpRole.TOTAL, OpRole.AFTER) for operand in operands)
            return OpRole.AFTER if after else OpRole.ONCE
        if self._begins(node) or not in_last_round:
            return OpRole.EARLY
        return OpRole.STAGED if node in self.on_parameters or node in self.backward else OpRole.LOCAL

    def _sums_alike(self, node: fx.Node) -> bool:
        """Whether every microbatch brings the same to a sum, as to the gradient of a linear function's bias."""
        return primitive_name(node) == "psum" and node.args[0] not in self.varying

    def _check_early(self) -> None:
        found = [
            node
            for node, role in self.of.items()
            if role is OpRole.EARLY and node in self.on_parameters and not self._is_slice_of_shared(node)
        ]
        if not found:
            return
        barrier = next((node for node in found if self.rounds.is_barrier(node)), found[-1])
        why = _why_all(barrier, self._leads_to_backward(barrier)) + self._no_batch(barrier)
        raise PipelineError(f"{info(barrier).source}: {why}")

    def _no_batch(self, barrier: fx.Node) -> str:
        """What to do where not the batch is gathered, but something beside it that was taken for a part of it."""
        batch = [node for node in self.traced.inputs if node in self.varying]
        below = set(_reached(barrier, operands_of))
        gathered = [node for node in batch if node in below]
        if primitive_name(barrier) != "all_gather" or not gathered or len(gathered) == len(batch):
            return ""
        paths = " and ".join(str(info(node).path or node.name) for node in gathered)
        return f". It is computed of {paths}: if that has no samples, say with batch= that it is not to be cut"

    def _is_slice_of_shared(self, node: fx.Node) -> bool:
        """Whether every microbatch takes its slice of what is computed once a step: there is nobody to wait for."""
        return primitive_name(node) == "pscatter" and self.of.get(node.args[0]) is OpRole.ONCE  # type: ignore[call-overload]

    def _leads_to_backward(self, node: fx.Node) -> bool:
        return any(each in self.backward for each in _reached(node, lambda each: each.users))

    def is_inline(self, node: fx.Node) -> bool:
        """Whether an op is repeated wherever its value is needed: it costs nothing, or its value may not be kept."""
        role = self.of.get(node)
        if role is OpRole.LOCAL:  # what follows from sums that come before it too: those it is given
            return True
        if role is OpRole.EARLY:
            return node not in self.late and not self._begins(node)
        if role is not OpRole.ONCE:
            return False
        if node in self.inlined or info(node).recomputed:
            return True
        return not operands_of(node) or is_view(node)

    def scope(self, node: fx.Node) -> str:
        """Where a value that a stage takes comes from: "input", "once", "microbatch" or "stage"."""
        if self.of.get(node) in (OpRole.STAGED, OpRole.LOCAL):
            return "stage"
        if node in self.varying:
            return "microbatch"
        return "input" if node.op == "placeholder" else "once"


def is_view(node: fx.Node) -> bool:
    """Whether an op computes nothing: a view, or a cast without communication."""
    return node.op == "call_function" and view_base(node) is not None


def _why_all(barrier: fx.Node, wanted: bool) -> str:
    """Which op needs all microbatches at once, and what to do about it."""
    op = _meant(barrier)
    fix = "normalise within groups of a microbatch's samples, x.unflatten(0, (groups, -1)), or use fp.accumulate"
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
    """The user's op that a collective over microbatches stands for: that which takes it whole, or left parts of it."""
    if primitive_name(barrier) != "all_gather":
        return next((node for node in _reached(barrier, operands_of) if _is_of_user(node)), barrier)
    near = [node for node in _reached(barrier, lambda each: each.users) if source_of(node) == source_of(barrier)]
    forward = [node for node in near if _is_of_user(node) and not info(node).backward]
    without = (node for node in forward if lookup(node.target) is None)
    return next(without, next(iter(forward), next(filter(_is_of_user, near), barrier)))


def _is_of_user(node: fx.Node) -> bool:
    return node.op == "call_function" and primitive_name(node) is None and node.target is not operator.getitem


def _reached(node: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """What is reached from an op, the nearest first, each once."""
    waiting, seen = deque(step(node)), {node}
    while waiting:
        each = waiting.popleft()
        if each not in seen:
            seen.add(each)
            yield each
            waiting += step(each)
