"""Executable form of a program on one rank of a mesh of processes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...ir import Aval, info, primitive_name
from ...program import (
    OWNED,
    STARTED,
    Program,
    is_only_use_of_own_memory,
    may_stay_in_place,
    one_scatter_at_a_time,
    overlapped,
    readers_before_writes,
)
from ..calls import PendingCollective
from ..execution import Recorded, Writer, with_regions
from .process_communicator import ProcessCommunicator

Readers = Mapping[fx.Node, Sequence[fx.Node]]  # by op that writes into operands, the ops that must have read them


class RankProgram:
    """Flat function of one program on one rank. Collectives start early and are waited for late."""

    def __init__(self, program: Program, carrier: ProcessCommunicator, record: bool = False) -> None:
        self.program, self.carrier = program, carrier
        self.record = Recorded(program.traced, lambda node: (carrier.rank,)) if record else None
        if program.is_compiled and not record:
            regions = with_regions(program)
            traced, order, readers = regions.traced, list(regions.traced.nodes), regions.readers
        else:
            traced, readers = program.traced, readers_before_writes(program.traced)
            order = overlapped(traced, readers)
        self.absent = program.absent(carrier.rank) if traced is program.traced else frozenset()
        before = dict(self.readers(order, readers))
        for node, ended in one_scatter_at_a_time(order).items():
            before[node] = [*before.get(node, ()), *ended]
        self.writer = Writer(
            traced, self.line, order=order, readers=before, record=self.record, recorded=program.is_captured
        )

    def readers(self, order: Sequence[fx.Node], readers: Readers) -> Readers:
        """Return the ops to wait for before each op that writes into its operands. A subclass may defer reads."""
        return readers

    def function(self) -> Callable[..., Any]:
        return self.writer.function()

    def line(self, node: fx.Node, writer: Writer) -> str:
        name = primitive_name(node)
        if node in self.absent and name not in OWNED:
            return writer.constant(_without_memory(node))
        text = writer.names.__getitem__
        if name is not None and self.is_started(node):
            writer.pending.add(node)
            operands = [writer.argument(x, text) for x in self.operands(node)]
            return f"{writer.constant(self.start(node, name))}({', '.join(operands)})"
        if name == "pscatter":
            return self._slice(node, writer)
        if name is not None:
            operand = "" if name == "axis_index" else text(node.args[0])
            return f"{writer.constant(self._collective(node, name))}({operand})"
        if node.target is operator.getitem:
            return f"{text(node.args[0])}[{node.args[1]}]"
        return writer.call(node, text)

    def is_started(self, node: fx.Node) -> bool:
        """Whether an op starts a collective that is waited for later."""
        if self.record is not None:  # while recording, every op ends before the next op begins
            return False
        return primitive_name(node) in STARTED and self.program.mesh.axis_size(tuple(node.args[1])) > 1

    def operands(self, node: fx.Node) -> list[fx.node.Argument]:
        """Return the arguments of the function that starts a collective."""
        return [node.args[0]]

    def start(self, node: fx.Node, name: str) -> Callable[..., PendingCollective]:
        return functools.partial(
            self.carrier.start,
            name,
            axes=tuple(node.args[1]),
            params=[param for param in node.args[2:] if not isinstance(param, str)],
            overwrite=is_only_use_of_own_memory(node.args[0]),
            where=self._where(node),
        )

    def _slice(self, node: fx.Node, writer: Writer) -> str:
        whole, axes, dim = node.args
        length = info(node).aval.shape[dim]
        begin = length * self.carrier.axis_index(tuple(axes))
        dense = f"memory_format={writer.constant(torch.contiguous_format)}"
        copy = "contiguous" if may_stay_in_place(node) else "clone"
        return f"{writer.names[whole]}.narrow({dim}, {begin}, {length}).{copy}({dense})"

    def _where(self, node: fx.Node) -> str:
        source = info(node).source
        return f"{source}: `{source.text}`" if source is not None else self.program.name

    def _collective(self, node: fx.Node, name: str) -> Callable[..., torch.Tensor]:
        target, arguments = node.target, node.args if name == "axis_index" else node.args[1:]
        if name in OWNED:  # without torch's dispatcher, for which the operand of some ranks is on another device
            target = getattr(self.carrier, name)
            arguments = [tuple(node.args[1]), *(param for param in node.args[2:] if not isinstance(param, str))]
        where = self._where(node)

        def call(*operand: torch.Tensor) -> torch.Tensor:
            self.carrier.where = where
            try:
                result: torch.Tensor = target(*operand, *arguments)
                return result
            finally:
                self.carrier.where = ""

        return call


def _without_memory(node: fx.Node) -> torch.Tensor | None:
    """Return a stand-in for a value that another rank holds: its shape on the meta device."""
    found = info(node).val
    return torch.empty(found.shape, dtype=found.dtype, device="meta") if isinstance(found, Aval) else None
