"""Executable form of a program on one rank of a mesh of processes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...collectives import OWNED, CollectiveCall
from ...ir import Aval, collective_call, info, operands_of, the_call
from ...program import (
    Program,
    ended_before,
    is_only_use_of_own_memory,
    is_started,
    may_outlast,
    may_stay_in_place,
    one_scatter_at_a_time,
    overlapped,
    readers_before_writes,
)
from ..calls import PendingCollective
from ..execution import Recorded, Writer, with_regions
from .process_communicator import ProcessCommunicator
from .started_moves import start_of

Readers = Mapping[fx.Node, Sequence[fx.Node]]  # by op that writes into operands, the ops that must have read them


class RankProgram:
    def __init__(self, program: Program, communicator: ProcessCommunicator, record: bool = False) -> None:
        self.program, self.communicator = program, communicator
        self.record = Recorded(program.traced, lambda node: (communicator.rank,)) if record else None
        if program.is_compiled and not record:
            regions = with_regions(program)
            traced, order, readers = regions.traced, list(regions.traced.nodes), regions.readers
        else:
            traced, readers = program.traced, readers_before_writes(program.traced)
            order = overlapped(traced, readers)
        self.absent = program.absent(communicator.rank) if traced is program.traced else frozenset()
        may_start = traced is program.traced and not record and not program.is_captured
        moves = [move for move in program.moves() if move.is_started and may_start]
        self.moves = {move.node: move for move in moves}
        before = dict(self.readers(order, readers))
        for node, ended in (*one_scatter_at_a_time(order).items(), *ended_before(order, moves).items()):
            before[node] = [*before.get(node, ()), *ended]
        replaced = may_outlast(traced, self.moves)
        self.arriving = set(replaced.values())  # inputs that the last step may still move
        self.writer = Writer(
            *(traced, self.line),
            order=order,
            readers=before,
            record=self.record,
            recorded=program.is_captured,
            pending=set(self.arriving),
            unfinished=replaced.keys(),
        )

    def readers(self, order: Sequence[fx.Node], readers: Readers) -> Readers:
        """Return the ops to wait for before each op that writes into its operands. A subclass may defer reads."""
        return readers

    def function(self) -> Callable[..., Any]:
        return self.writer.function()

    def line(self, node: fx.Node, writer: Writer) -> str:
        call = collective_call(node)
        if node in self.absent and (call is None or call.kind not in OWNED):
            return writer.constant(_without_memory(node))
        text = writer.names.__getitem__
        if call is not None and self.is_started(node):
            writer.pending.add(node)
            operands = [writer.argument(x, text) for x in self.operands(node)]
            return f"{writer.constant(self.start(node))}({', '.join(operands)})"
        if node in self.moves:
            writer.pending.add(node)
            return f"{writer.constant(start_of(self.moves[node]))}({', '.join(text(x) for x in operands_of(node))})"
        if call is not None and call.kind == "pscatter":
            return self._slice(node, call, writer)
        if call is not None:
            operand = "" if call.operand is None else text(call.operand)
            return f"{writer.constant(self._collective(node, call))}({operand})"
        if node.target is operator.getitem:
            return f"{text(node.args[0])}[{node.args[1]}]"
        return writer.call(node, text)

    def is_started(self, node: fx.Node) -> bool:
        # While recording, every op ends before the next op begins.
        return self.record is None and is_started(node, self.program.mesh)

    def operands(self, node: fx.Node) -> list[fx.node.Argument]:
        return [the_call(node).operand]

    def start(self, node: fx.Node) -> Callable[..., PendingCollective]:
        call = the_call(node)
        overwrite, apart = is_only_use_of_own_memory(call.operand), replace(call, operand=None)
        return functools.partial(self.communicator.start, apart, overwrite=overwrite, where=self._where(node))

    def _slice(self, node: fx.Node, call: CollectiveCall, writer: Writer) -> str:
        length = info(node).aval.shape[call.dims[0]]
        begin = length * self.communicator.axis_index(call.axes)
        dense = f"memory_format={writer.constant(torch.contiguous_format)}"
        copy = "contiguous" if may_stay_in_place(node) else "clone"
        return f"{writer.names[call.operand]}.narrow({call.dim}, {begin}, {length}).{copy}({dense})"

    def _where(self, node: fx.Node) -> str:
        source = info(node).source
        return f"{source}: `{source.text}`" if source is not None else self.program.name

    def _collective(self, node: fx.Node, call: CollectiveCall) -> Callable[..., torch.Tensor]:
        if call.kind in OWNED:  # without torch's dispatcher: it sees the operand of some ranks on another device
            target = functools.partial(getattr(self.communicator, call.kind), axes=call.axes, **call.routing)
        else:
            target = functools.partial(call.target, axes=list(call.axes), **call.routing, **call.states)
        where = self._where(node)

        def run(*operand: torch.Tensor) -> torch.Tensor:
            self.communicator.where = where
            try:
                result: torch.Tensor = target(*operand)
                return result
            finally:
                self.communicator.where = ""

        return run


def _without_memory(node: fx.Node) -> torch.Tensor | None:
    found = info(node).val
    return torch.empty(found.shape, dtype=found.dtype, device="meta") if isinstance(found, Aval) else None
