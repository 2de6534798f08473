"""Add later microbatches of a pipeline stage to the running sums in place.

The summand of the first microbatch becomes the running sum. It may be overwritten if its memory is separate: an op of
the program allocated it at full size, and no other output of the program uses it. Then no residual, message or other
sum shares the memory.
"""

from __future__ import annotations

import operator
from collections import Counter
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
        programs = dict.fromkeys(program for total in unit.sums for program, _ in (total.first, *total.adding))
        apart = {
            program: _separate_results(program) for program in dict.fromkeys(total.first[0] for total in unit.sums)
        }
        counts = {program: Counter(program.traced.outputs) for program in programs}
        for total in unit.sums:
            first, place = total.first
            for program, index in total.adding if place in apart[first] else ():
                result = program.traced.outputs[index]
                if counts[program][result] == 1 and _adds_to_input(result):
                    result.target = aten.add_.Tensor


def _separate_results(program: Program) -> set[int]:
    """Return the numbers of the results that have memory of their own, of full size."""
    outputs = program.traced.outputs
    owners = Counter(_base(out, through_collectives=True) for out in outputs)
    found = set()
    for number, out in enumerate(outputs):
        base = _base(out, through_collectives=False)
        if base is not None and owners[base] == 1:
            (node, index), aval = base, info(out).aval
            whole = info(node).result(index or 0)
            if whole.numel == aval.numel and whole.dtype == aval.dtype:
                found.add(number)
    return found


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


def _adds_to_input(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    total, part = node.args
    return (
        total.op == "placeholder"
        and list(total.users) == [node]
        and isinstance(part, fx.Node)
        and part is not total
        and info(total).val == info(node).val
    )
