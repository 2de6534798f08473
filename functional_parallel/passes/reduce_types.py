"""Dtype of the sums of parameters' gradients over ranks.

A partitioned function may cast a parameter before it combines it with varying values. Then the gradient is summed in
the narrow dtype, before the transpose of that cast. This pass moves the cast before the sums: over uses of the
parameter, over microbatches and over ranks. If the plan requests it, sums over ranks, and only these, are narrowed
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import MICROBATCH
from ..ir import (
    Role,
    Traced,
    change_call,
    collective_call,
    first_operand,
    info,
    operands_of,
    primitive_name,
    reached,
    update_info,
)
from .program_pass import Phase, ProgramPass
from .swap import commutes_with_sum, is_cast

aten = torch.ops.aten

_SUMS = ("psum", "psum_scatter", "reduce")
_JOINS = {aten.cat.default, aten.stack.default}  # gradients of a parameter's slices become the parameter's gradient


@dataclass(frozen=True)
class ReduceDtype(ProgramPass):
    """Sum gradients of parameters over ranks in one type."""

    dtype: torch.dtype  # float32 for the dtype of the parameters themselves, or a narrower dtype
    name: ClassVar[str] = "reduction types"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        reached: set[fx.Node] = set()
        for cast in list(traced.nodes):
            if not _widens_a_gradient(cast):
                continue
            starts = _cast_before_sums(traced, cast)
            if self.dtype.itemsize < 4:
                for start in starts:
                    self._narrow_sums_after(traced, start, reached)
                    self._narrow_sums_before(traced, start)

    def _narrow_sums_after(self, traced: Traced, start: fx.Node, reached: set[fx.Node]) -> None:
        """Narrow sums after `start`. `reached`: gradients visited; a join waits for all its operands."""
        pending = [start]
        for node in pending:
            reached.add(node)
            for user in list(node.users):
                if _is_sum_over_ranks(user) and info(user).aval.dtype == info(start).aval.dtype:
                    pending.append(self._narrow(traced, user))
                elif user.target in _JOINS:
                    pending += [user] if reached.issuperset(user.args[0]) else []
                elif _is_linear(user) or user.target is aten.select.int or primitive_name(user) == "psum":
                    pending.append(user)

    def _narrow_sums_before(self, traced: Traced, start: fx.Node) -> None:
        """Narrow the sum of a gradient that an island, a float32 function, left wide and that is rounded later."""
        rounding = start.args[0]
        if is_cast(rounding) and info(rounding.args[0]).aval.dtype == info(start).aval.dtype:
            for node in filter(_is_sum_over_ranks, _chain(rounding)):
                self._narrow(traced, node)

    def _narrow(self, traced: Traced, total: fx.Node) -> fx.Node:
        operand, wide = first_operand(total), info(total).aval
        with traced.graph.inserting_before(total):
            narrow = _source_of_cast(operand, self.dtype) or _to(traced, operand, self.dtype, operand)
        change_call(total, operand=narrow)
        with traced.graph.inserting_after(total):
            result = _to(traced, total, wide.dtype, total)
        update_info(total, val=replace(wide, dtype=self.dtype))
        traced.redirect(total, result)
        return result


def _widens_a_gradient(node: fx.Node) -> bool:
    is_ours = is_cast(node) and info(node).backward and info(node).role is Role.GRADIENT
    return is_ours and info(first_operand(node)).aval.dtype.itemsize < info(node).aval.dtype.itemsize


def _cast_before_sums(traced: Traced, cast: fx.Node) -> list[fx.Node]:
    """Move a widening cast before all sums, towards the op that computes the gradient; return the new casts."""
    chain = _chain(cast)
    if not any(primitive_name(node) in _SUMS or _is_sum_of_two(node) for node in chain):
        return [cast]
    wide, moved = info(cast).aval.dtype, []
    for node in chain:
        update_info(node, val=replace(info(node).aval, dtype=wide))
    for node in chain:
        for operand in {each: None for each in node.all_input_nodes if each not in chain}:
            with traced.graph.inserting_before(node):
                moved.append(_to(traced, operand, wide, cast))
            node.replace_input_with(operand, moved[-1])
    traced.replace(cast, cast.args[0])
    return moved


def _chain(cast: fx.Node) -> list[fx.Node]:
    def linear(nodes: list[fx.Node]) -> list[fx.Node]:
        ours = (each for each in nodes if each.op == "call_function" and info(each).backward and len(each.users) == 1)
        return [each for each in ours if _is_linear(each) or primitive_name(each) in _SUMS]

    return list(reached(linear([cast.args[0]]), lambda node: linear(_summands(node))))


def _is_sum_over_ranks(node: fx.Node) -> bool:
    call = collective_call(node, *_SUMS)
    return call is not None and call.axes != (MICROBATCH,)


def _summands(node: fx.Node) -> list[fx.Node]:
    return operands_of(node) if node.target in _JOINS or _is_sum_of_two(node) else [first_operand(node)]


def _is_linear(node: fx.Node) -> bool:
    is_part = node.target in _JOINS or node.target is aten.select_backward.default
    return is_part or commutes_with_sum(node) or _is_sum_of_two(node)


def _is_sum_of_two(node: fx.Node) -> bool:
    both = node.target is aten.add.Tensor and all(isinstance(arg, fx.Node) for arg in node.args) and not node.kwargs
    return both and len({info(arg).val for arg in node.args}) == 1


def _source_of_cast(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    return node.args[0] if is_cast(node) and info(node.args[0]).aval.dtype == dtype else None


def _to(traced: Traced, value: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    known = info(like)._replace(type=info(value).type, val=replace(info(value).aval, dtype=dtype))
    return traced.call(aten._to_copy.default, (value,), known, {"dtype": dtype})
