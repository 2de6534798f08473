"""Executable form of a program on one rank of a mesh of processes."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...ir import Aval, info, primitive_name
from ...ops import PACK, UNPACK, UNPACK_INTO
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
from ..buffers import BucketLayout, LazyBucket
from ..calls import PendingCollective
from ..execution import Recorded, Writer, with_regions
from .process_communicator import ProcessCommunicator

aten = torch.ops.aten


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
        self._absent = program.absent(carrier.rank) if traced is program.traced else frozenset()
        self._readers = readers
        pairs = itertools.pairwise(order)
        self._packed_when_sent = {node: after for node, after in pairs if self._only_sends(after, node)}
        layouts = ((node, self._layout(node)) for node in order if self._is_started(node))
        self._layouts = {node: layout for node, layout in layouts if layout is not None}
        self._taken = {user: (node, index) for node in self._layouts for index, user in enumerate(node.users)}
        self._overwritten = {node: _old_values(node) for node in self._layouts}
        before = {node: [self._packed_when_sent.get(reader, reader) for reader in readers[node]] for node in readers}
        for node, ended in one_scatter_at_a_time(order).items():
            before[node] = [*before.get(node, ()), *ended]
        self.writer = Writer(
            traced, self.line, order=order, readers=before, record=self.record, recorded=program.is_captured
        )

    def function(self) -> Callable[..., Any]:
        return self.writer.function()

    def line(self, node: fx.Node, writer: Writer) -> str:
        name = primitive_name(node)
        if node in self._absent and name not in OWNED:
            return writer.constant(_without_memory(node))
        text = writer.names.__getitem__
        if name is not None and self._is_started(node):
            writer.pending.add(node)
            operands = [writer.argument(x, text) for x in (node.args[0], *self._overwritten.get(node, ()))]
            return f"{writer.constant(self._start(node, name))}({', '.join(operands)})"
        if name == "pscatter":
            return self._slice(node, writer)
        if name is not None:
            operand = "" if name == "axis_index" else text(node.args[0])
            return f"{writer.constant(self._collective(node, name))}({operand})"
        if node.target is operator.getitem:
            return f"{text(node.args[0])}[{node.args[1]}]"
        if node in self._taken:
            brought, index = self._taken[node]
            return f"{text(brought)}.take({index})"
        if node in self._packed_when_sent:
            given_up = [is_only_use_of_own_memory(value) for value in node.args[0]]
            arguments = ", ".join(writer.argument(arg, text) for arg in (*node.args, given_up))
            return f"{writer.constant(LazyBucket)}({arguments})"
        return writer.call(node, text)

    def _is_started(self, node: fx.Node) -> bool:
        if self.record is not None:  # while recording, every op ends before the next op begins
            return False
        return primitive_name(node) in STARTED and self.program.mesh.axis_size(tuple(node.args[1])) > 1

    def _only_sends(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether an op packs a bucket that only the next op reads, which starts to send it."""
        return value.target is PACK and self._is_started(node) and list(value.users) == [node]

    def _layout(self, node: fx.Node) -> BucketLayout | None:
        """Return the layout of the tensors in the result of `node`, if no op reads the full result. Else None."""
        if primitive_name(node) == "all_gather" and self._is_only_unpacked(node):
            unpacked = [user.args[-4:] for user in node.users]
            return BucketLayout(unpacked[0][0], tuple((begin, tuple(shape), dim) for _, begin, shape, dim in unpacked))
        if primitive_name(node) == "psum" and node.args[0] in self._packed_when_sent:
            lengths = [info(value).aval.numel for value in node.args[0].args[0]]
            ends = itertools.accumulate(lengths)
            stretches = [(node, 0, end - length, end) for length, end in zip(lengths, ends, strict=True)]
            if [(user.target, user.args) for user in node.users] == [(aten.slice.Tensor, each) for each in stretches]:
                return BucketLayout(1, tuple((begin, (end - begin,), 0) for _, _, begin, end in stretches))
        return None

    def _is_only_unpacked(self, gather: fx.Node) -> bool:
        """Whether no op reads the full result, or the values to be overwritten when the gather starts."""
        targets = {user.target for user in gather.users}
        may_write = {UNPACK, UNPACK_INTO} if gather in self._readers else {UNPACK}
        return bool(targets) and targets <= may_write

    def _slice(self, node: fx.Node, writer: Writer) -> str:
        """Return code that slices this rank's shard from a replicated value."""
        whole, axes, dim = node.args
        length = info(node).aval.shape[dim]
        begin = length * self.carrier.axis_index(tuple(axes))
        dense = f"memory_format={writer.constant(torch.contiguous_format)}"
        copy = "contiguous" if may_stay_in_place(node) else "clone"
        return f"{writer.names[whole]}.narrow({dim}, {begin}, {length}).{copy}({dense})"

    def _start(self, node: fx.Node, name: str) -> Callable[..., PendingCollective]:
        axes = tuple(node.args[1])
        params = [param for param in node.args[2:] if not isinstance(param, str)]
        layout = self._layouts.get(node)
        start = functools.partial(
            self.carrier.start,
            name,
            axes=axes,
            overwrite=is_only_use_of_own_memory(node.args[0]),
            where=self._where(node),
        )
        if layout is None:
            return functools.partial(start, params=params)
        if not self._overwritten[node]:
            return functools.partial(start, params=[*params, layout])
        return lambda x, *targets: start(x, params=[*params, replace(layout, targets=targets)])

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


def _old_values(collective: fx.Node) -> list[fx.Node | None]:
    """Return per result tensor the value that it is unpacked over, or None. The list is empty if there are none."""
    found = [user.args[0] if user.target is UNPACK_INTO else None for user in collective.users]
    return found if any(found) else []
