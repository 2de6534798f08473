"""Find the values of a program that differ by microbatch, and the round of microbatches of each op.

A value that needs a sum over all microbatches, such as the number of targets of a loss, must wait for all of them.
Ops are therefore divided into rounds: every microbatch passes through one round before any enters the next. Each op
runs in the last possible round. The forward then runs next to its backward, and only the operands of sums run earlier.
"""

from __future__ import annotations

from torch import fx

from sharding_specs import P

from ...errors import UnrollError
from ...ir import Traced, collective_call, info, operands_of, primitive_name


class MicrobatchRounds:
    def __init__(self, traced: Traced, axis: str, in_specs: list[P]) -> None:
        self.traced, self.axis = traced, axis
        self.varying = self._varying(in_specs)  # the values that differ by microbatch
        self.of, self.last = self._last_rounds()  # round of each op; a barrier's result is available after its round

    def is_barrier(self, node: fx.Node) -> bool:
        name = primitive_name(node)
        return name not in (None, "axis_index", "pscatter", "pcast") and names_axis(node, self.axis)

    def _varying(self, in_specs: list[P]) -> set[fx.Node]:
        found = {node for node, spec in zip(self.traced.inputs, in_specs, strict=True) if self.axis in spec.axes}
        for node in self.traced.nodes:
            if self.is_barrier(node) and primitive_name(node) != "psum_scatter":
                continue
            if names_axis(node, self.axis) or any(operand in found for operand in operands_of(node)):
                found.add(node)
        return found

    def _last_rounds(self) -> tuple[dict[fx.Node, int], int]:
        first: dict[fx.Node, int] = {}
        for node in self.traced.nodes:
            after = (first.get(each, 0) + (each in first and self.is_barrier(each)) for each in operands_of(node))
            first[node] = max(after, default=0)
        last = max((first[node] for node in first if node in self.varying or self.is_barrier(node)), default=0)
        found: dict[fx.Node, int] = {}
        for node in reversed(list(self.traced.nodes)):
            users = [found[user] for user in node.users if user in found]
            wanted = min(users, default=last + 1)
            found[node] = min(wanted - 1, last) if self.is_barrier(node) else wanted
            if node in self.varying:
                found[node] = min(found[node], last)
        return found, last


def names_axis(node: fx.Node, axis: str) -> bool:
    """Whether an op is a primitive over this axis. Raise `UnrollError` if it is over others at the same time."""
    call = collective_call(node)
    if call is None:
        return False
    if axis in call.axes and len(call.axes) > 1:
        raise UnrollError(f"{info(node).source}: {call.kind} over {call.axes} at once; name {axis!r} apart")
    return axis in call.axes
