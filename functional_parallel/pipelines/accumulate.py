"""Sums over microbatches are added up where they lie, when a microbatch's own part lies by itself."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..ir import info, operands_of, primitive_name
from ..passes import fuse_matmul_accumulate
from ..program import Program, shares_memory
from .stages import ActionPrograms

__all__ = ["accumulate_in_place"]

aten = torch.ops.aten


def accumulate_in_place(work: ActionPrograms) -> list[Program]:
    """Let a stage's later microbatches write their sums over the sums so far; returns the programs that changed.

    The first microbatch's part begins the sum. It may be written over when it lies in memory of its own: made by an op
    there, whole, and of which nothing else leaves the program, so that no residual, message or other sum lies in it.
    """
    changed: dict[Program, None] = {}
    count = len(work.totals)
    for place, part in enumerate(work.totals.values(), len(work.first.outputs) - count):
        if _lies_by_itself(work.first.program, place):
            for program, index in ((work.following.program, place), (part.program, 0)):
                if _adds_to_input(program, index):
                    program.traced.outputs[index].target = aten.add_.Tensor  # type: ignore[union-attr]
                    changed.setdefault(program)
    for program in work.programs:
        if fuse_matmul_accumulate(program.traced):
            program.traced.seal()
            changed.setdefault(program)
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
    """The op in whose result, or in which of its results, a value may lie; None for inputs.

    What a collective returns may lie in its operand's memory, or in memory that it uses again.
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
    """Whether a result is an input, and nothing else's, with something added."""
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
