"""Place the sums over microbatches of a pipeline with a single microbatch.

A sum over microbatches ends the pipeline, and the ops that depend on it run after the pipeline. With several
microbatches, every value that all of them share is such a sum. A single microbatch does not wait for others, not even
for a batch norm. The gradient of a value computed from the full batch is complete without a sum.

Sums are therefore dropped where the microbatch continues after them. They are inserted where the pipeline ends: at
the update, at results, and where a value of the microbatch is combined with a value computed after the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import P

from ...collectives import CollectiveCall, State
from ...ir import Traced, first_operand, info, operands_of, reached
from ..program_pass import Phase, ProgramPass, Settings, Unit
from .rounds import MicrobatchRounds


@dataclass(frozen=True)
class SumsOfOneMicrobatch(ProgramPass):
    """Keep sums over the axis of a pipeline's only microbatch where the pipeline ends, and nowhere else."""

    axis: str
    name: ClassVar[str] = "one microbatch"
    phase: ClassVar[Phase] = Phase.CUT
    is_required: ClassVar[bool] = True

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        axis = settings.pipelined
        return [cls(axis)] if axis is not None and settings.splits[axis].ranks == 1 else []

    def rewrite(self, unit: Unit) -> None:
        axis, traced, in_specs = self.axis, unit.program.traced, unit.program.in_specs
        rounds = MicrobatchRounds(traced, axis, in_specs)
        goes_on = _leading_to(traced, lambda n: n in rounds.varying and info(n).typed[axis] is not State.INVARIANT)
        for node in list(filter(rounds.is_barrier, traced.nodes)):
            if any(user in goes_on for user in node.users):
                traced.replace(node, first_operand(node))
        _Ends(traced, axis, in_specs).write(unit.program.out_specs)


class _Ends:
    def __init__(self, traced: Traced, axis: str, in_specs: list[P]) -> None:
        self.traced, self.axis = traced, axis
        self.rounds = MicrobatchRounds(traced, axis, in_specs)
        self.varying = set(self.rounds.varying)
        self.of_model = _leading_to(traced, lambda node: bool(info(node).backward))
        self.sums: dict[fx.Node, fx.Node] = {}

    def write(self, out_specs: list[P]) -> None:
        after: set[fx.Node] = set()  # the sums, and the values that depend on them
        for node in list(self.traced.nodes):
            if self.rounds.is_barrier(node):
                after.add(node)
                continue
            follows = any(operand in after for operand in operands_of(node))
            ended = [x for x in operands_of(node) if x in self.varying and (follows or self._is_update(node, x))]
            for operand in ended:
                node.replace_input_with(operand, self._sum(operand))
            if follows or ended:
                after.add(node)
                self.varying.discard(node)
        self.traced.outputs = [
            self._sum(output) if output in self.varying and self.axis not in spec.axes else output
            for output, spec in zip(self.traced.outputs, out_specs, strict=True)
        ]

    def _is_update(self, node: fx.Node, gradient: fx.Node) -> bool:
        return node not in self.of_model and bool(info(gradient).backward)

    def _sum(self, value: fx.Node) -> fx.Node:
        if value not in self.sums:
            with self.traced.graph.inserting_after(value):
                known = info(value)._replace(type=info(value).typed.having([self.axis], State.INVARIANT))
                self.sums[value] = self.traced.emit(CollectiveCall("psum", value, (self.axis,), src="varying"), known)
        return self.sums[value]


def _leading_to(traced: Traced, chosen: Callable[[fx.Node], bool]) -> set[fx.Node]:
    return set(reached(filter(chosen, traced.nodes), operands_of))
