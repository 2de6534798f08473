"""Add later microbatches of a pipeline stage to the running sums in place.

The summand of the first microbatch becomes the running sum. It may be overwritten if its memory is separate: an op of
the program allocated it at full size, and no other output of the program uses it. Then no residual, message or other
sum shares the memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..ir import info, operands_of, primitive_name
from ..program import Program, shares_memory
from .program_pass import Phase, ProgramPass, Scope, Settings, Unit

aten = torch.ops.aten


@dataclass(frozen=True)
class RunningSums(ProgramPass):
    """Write sums over microbatches into the memory of the running sum."""

    name: ClassVar[str] = "in place"
    phase: ClassVar[Phase] = Phase.IN_PLACE
    scope: ClassVar[Scope] = Scope.PAIR

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [] if settings.pipelined is None else [cls()]

    def rewrite(self, unit: Unit) -> None:
        for total in unit.sums:
            if _lies_by_itself(*total.first):
                for program, index in total.adding:
                    if _adds_to_input(program, index):
                        program.traced.outputs[index].target = aten.add_.Tensor


def _lies_by_itself(program: Program, place: int) -> bool:
    outputs = program.traced.outputs
    base = _base(outputs[place], through_collectives=False)
    others = (_base(out, through_collectives=True) for index, out in enumerate(outputs) if index != place)
    if base is None or base in others:
        return False
    (node, index), aval = base, info(outputs[place]).aval
    whole = info(node).result(index or 0)
    return whole.numel == aval.numel and whole.dtype == aval.dtype


def _base(value: fx.Node, *, through_collectives: bool) -> tuple[fx.Node, int | None] | None:
    """Return the op (and the index among its results) that may own the memory of `value`; None for inputs.

    The result of a collective may share the memory of its operand, or use memory that the collective will reuse.
    """
    while value.op == "call_function":
        if value.target is operator.getitem and not shares_memory(value.args[0]):
            return value.args[0], value.args[1]
        name = primitive_name(value)
        if name not in (None, "pcast") and not through_collectives:
            return None
        if (name is None and not shares_memory(value)) or not operands_of(value):
            return value, None
        value = operands_of(value)[0]
    return None


def _adds_to_input(program: Program, place: int) -> bool:
    node = program.traced.outputs[place]
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    total, part = node.args
    return (
        total in program.traced.inputs
        and list(total.users) == [node]
        and isinstance(part, fx.Node)
        and part is not total
        and info(total).val == info(node).val
        and program.traced.outputs.count(node) == 1
    )
