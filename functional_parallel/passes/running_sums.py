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

from ..ir import Aval, info, operands_of, primitive_name
from ..program import Program, shares_memory
from .program_pass import Phase, ProgramPass, Scope, Settings, Unit

aten = torch.ops.aten

_Base = tuple[fx.Node, int | None]  # an op, and the index among its results


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
        firsts = dict.fromkeys(total.first[0] for total in unit.sums)
        own = {(program, place) for program in firsts for place in lying_by_themselves(program)}
        # Equal sums share a program, which writes in place only if it may do so for all of them.
        kept = {each for total in unit.sums if total.first not in own for each in total.adding}
        adding = dict.fromkeys(each for total in unit.sums for each in total.adding)
        uses = {program: Counter(program.traced.outputs) for program, _ in adding}
        for program, place in adding:
            node = program.traced.outputs[place]
            if (program, place) not in kept and uses[program][node] == 1 and _adds_to_input(node):
                node.target = aten.add_.Tensor


def lying_by_themselves(program: Program) -> set[int]:
    """Return the outputs, by position, with memory separate from all others."""
    outputs = program.traced.outputs
    sharing = Counter(_base(output, through_collectives=True) for output in outputs)
    bases = (_base(output, through_collectives=False) for output in outputs)
    return {at for at, base in enumerate(bases) if base and sharing[base] == 1 and _is_all(outputs[at], *base)}


def _is_all(output: fx.Node, node: fx.Node, index: int | None) -> bool:
    whole, val = info(node).results[index or 0], info(output).val
    return isinstance(val, Aval) and isinstance(whole, Aval) and (whole.numel, whole.dtype) == (val.numel, val.dtype)


def _base(value: fx.Node, *, through_collectives: bool) -> _Base | None:
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
