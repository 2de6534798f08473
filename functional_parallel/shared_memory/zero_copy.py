"""Executable form of a program that packs buckets where they are sent, and receives tensors where they stay."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..ir import info, tensor_operands, the_call
from ..ops import PACK, UNPACK, UNPACK_INTO
from ..program import is_only_use_of_own_memory
from ..runtime import PendingCollective, RankProgram, Readers, Writer
from .packed import LazyBucket
from .unpacked import BucketLayout

aten = torch.ops.aten


class ZeroCopyProgram(RankProgram):
    def readers(self, order: Sequence[fx.Node], readers: Readers) -> Readers:
        self._readers = readers
        pairs = itertools.pairwise(order)
        self._packed_when_sent = {node: after for node, after in pairs if self._only_sends(after, node)}
        layouts = ((node, self._layout(node)) for node in order if self.is_started(node))
        self._layouts = {node: layout for node, layout in layouts if layout is not None}
        self._taken = {user: (node, index) for node in self._layouts for index, user in enumerate(node.users)}
        self._overwritten = {node: _old_values(node) for node in self._layouts}
        return {node: [self._packed_when_sent.get(each, each) for each in readers[node]] for node in readers}

    def line(self, node: fx.Node, writer: Writer) -> str:
        text = writer.names.__getitem__
        if node in self.absent:
            return super().line(node, writer)
        if node in self._taken:
            brought, index = self._taken[node]
            return f"{text(brought)}.take({index})"
        if node in self._packed_when_sent:
            given_up = [is_only_use_of_own_memory(value) for value in node.args[0]]
            arguments = ", ".join(writer.argument(arg, text) for arg in (*node.args, given_up))
            return f"{writer.constant(LazyBucket)}({arguments})"
        return super().line(node, writer)

    def operands(self, node: fx.Node) -> list[fx.node.Argument]:
        return [*super().operands(node), *self._overwritten.get(node, ())]

    def start(self, node: fx.Node) -> Callable[..., PendingCollective]:
        start, layout = super().start(node), self._layouts.get(node)
        if layout is None:
            return start
        if not self._overwritten[node]:
            return functools.partial(start, layout=layout)
        return lambda x, *targets: start(x, layout=replace(layout, targets=targets))

    def _only_sends(self, node: fx.Node, value: fx.Node) -> bool:
        return value.target is PACK and self.is_started(node) and list(value.users) == [node]

    def _layout(self, node: fx.Node) -> BucketLayout | None:
        """Return the layout of the tensors in the result of `node`, if no op reads the full result. Else None."""
        call = the_call(node)
        if call.kind == "all_gather" and self._is_only_unpacked(node):
            unpacked = [user.args[-4:] for user in node.users]
            return BucketLayout(unpacked[0][0], tuple((begin, tuple(shape), dim) for _, begin, shape, dim in unpacked))
        if call.kind == "psum" and call.operand in self._packed_when_sent:
            lengths = [info(value).aval.numel for value in tensor_operands(call.operand)]
            ends = itertools.accumulate(lengths)
            stretches = [(node, 0, end - length, end) for length, end in zip(lengths, ends, strict=True)]
            if [(user.target, user.args) for user in node.users] == [(aten.slice.Tensor, each) for each in stretches]:
                return BucketLayout(1, tuple((begin, (end - begin,), 0) for _, _, begin, end in stretches))
        return None

    def _is_only_unpacked(self, gather: fx.Node) -> bool:
        targets = {user.target for user in gather.users}
        may_write = {UNPACK, UNPACK_INTO} if gather in self._readers else {UNPACK}
        return bool(targets) and targets <= may_write


def _old_values(collective: fx.Node) -> list[fx.Node | None]:
    found = [user.args[0] if user.target is UNPACK_INTO else None for user in collective.users]
    return found if any(found) else []
