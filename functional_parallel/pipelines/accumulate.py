"""Accumulation in place of sums over microbatches, for summands that have separate memory."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..ir import info, operands_of, primitive_name
from ..passes import fuse_matmul_accumulate
from ..program import Program, shares_memory
from .stages import ActionPrograms

aten = torch.ops.aten


def accumulate_in_place(work: ActionPrograms) -> list[Program]:
    """Let later microbatches of a stage overwrite the running sums. Return the programs that changed.

    The summand of the first microbatch becomes the running sum. It may be overwritten if its memory is separate: an op
    of the program allocated it at full size, and no other output of the program uses it. Then no residual, message or
    other sum shares the memory.
    """
    changed: dict[Program, None] = {}
    count = len(work.totals)
    for place, part in enumerate(work.totals.values(), len(work.first.outputs) - count):
        if _lies_by_itself(work.first.program, place):
            for program, index in ((work.following.program, place), (part.program, 0)):
                if _adds_to_input(program, index):
                    program.traced.outputs[index].target = aten.add_.Tensor
                    changed.setdefault(program)
    for part in work.parts:
        if fuse_matmul_accumulate(part.program.traced):
            part.program.traced.seal()
            changed.setdefault(part.program)
    return list(changed)


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
    """Whether a result is an input plus another value, and the input has no other user."""
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
