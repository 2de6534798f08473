"""Send gathers of parameters and sums of gradients in another format, with fewer bytes (ZeRO++, arXiv 2306.10209).

One pass writes the format into the calls, before they are merged. The other pass is among the last. It replaces each of
these calls. A gather sends bytes. A reduce-scatter becomes an all-to-all of bytes, and each rank adds what it receives;
a ring would quantise partial sums again at every rank. An all-reduce becomes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import CollectiveCall, State
from ..ir import Args, NodeInfo, Role, Traced, change_call, collective_call, info, the_call
from ..ops import (
    DEQUANTISE,
    DEQUANTISE_SUM,
    IDENTITY,
    NEW_ERROR,
    PACK,
    QUANTISE,
    UNPACK,
    UNSENT,
    WITH_ERROR,
    wire_bytes,
)
from .program_pass import Phase, ProgramPass, Scope, Settings, Unit

aten = torch.ops.aten

_THEN = "+"  # between the formats of an all-reduce: the reduce-scatter's, and the gather's


@dataclass(frozen=True)
class WireFormats(ProgramPass):
    """Write the format of gathers of parameters, and the format of sums of gradients, over some axes."""

    axes: tuple[str, ...]
    gather: str  # format of gathers, "" to leave them unchanged
    reduce: str  # format of sums
    stored: torch.dtype | None = None  # dtype of the new parameters that have masters
    feeds_back: bool = False  # whether the state has an error of each sum
    name: ClassVar[str] = "wire formats"
    phase: ClassVar[Phase] = Phase.SUMS
    scope: ClassVar[Scope] = Scope.STAGE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        sums = dict[str, list[fx.Node]]()  # by parameter
        for node in traced.nodes:
            call = collective_call(node, "all_gather", "psum", "psum_scatter")
            if call is not None and set(call.axes) <= set(self.axes) and info(node).aval.dtype.is_floating_point:
                change_call(node, wire=self._format(node, call.kind))
                if call.kind != "all_gather" and the_call(node).wire:
                    sums.setdefault(info(node).parameters[0], []).append(node)
        errors = [node for node in traced.nodes if node.target is NEW_ERROR and node.args[3][0] in self.axes]
        for parameter in sorted(sums.keys() - {node.args[4] for node in errors}) if self.feeds_back else ():
            raise ValueError(
                f"compress(feedback=…): the gradient of {parameter} is summed where no error of it is held: in a "
                "program without a state, which fp.train_step has, or in a backward of an asynchronous pipeline; leave "
                "feedback= out, or take another schedule"
            )
        for node in errors:
            traced.replace(node, _fed_back(traced, node, sums.get(node.args[4], []), mesh))

    def _format(self, node: fx.Node, kind: str) -> str:
        role = info(node).role
        if kind != "all_gather":
            both = f"{self.reduce}{_THEN}{self.gather or IDENTITY}" if kind == "psum" and self.reduce else self.reduce
            return both if role is Role.GRADIENT else ""
        is_new = role is Role.NEW_PARAMETER and (self.gather == IDENTITY or info(node).aval.dtype == self.stored)
        return self.gather if role is Role.PARAMETER or is_new else ""


@dataclass(frozen=True)
class Compressed(ProgramPass):
    """Quantise before a collective that has a format, and dequantise after it."""

    name: ClassVar[str] = "compressed"
    phase: ClassVar[Phase] = Phase.WIRE
    scope: ClassVar[Scope] = Scope.STAGE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls()] if any(isinstance(each, WireFormats) for each in settings.requested) else []

    def rewrite(self, unit: Unit) -> str | None:
        sent = [pair for program in unit.programs for pair in _lower(program.traced, program.mesh)]
        if not sent:
            return None
        before, after = map(sum, zip(*sent, strict=True))
        return f"compressed: {len(sent)} collectives send {after} bytes per rank, of {before} without compress"


def _lower(traced: Traced, mesh: Mesh) -> list[tuple[int, int]]:
    """Replace the calls that have a format. Return the bytes that each would send, and the bytes that it sends."""
    found = []
    with traced.without_output() as new:
        for node in list(traced.nodes):
            call = collective_call(node)
            ranks = 1 if call is None else mesh.axis_size(call.axes)
            if call is not None and call.wire and ranks > 1:
                with traced.graph.inserting_before(node):
                    sent = _SentCall(traced, node, call, ranks)
                    new[node] = sent.result()
                node.replace_all_uses_with(new[node])
                traced.graph.erase_node(node)
                found.append((sent.plain, sent.sent))
    return found


def _fed_back(traced: Traced, node: fx.Node, sums: Sequence[fx.Node], mesh: Mesh) -> fx.Node:
    """Add an error before each sum of a gradient over the first of the axes. Return the new error.

    A sum is sent with all bits if the error does not have its summands.
    """
    error, _, scale, axes, _, beta = node.args
    for each in sums:
        call = the_call(each)
        if axes[0] not in call.axes or not set(call.axes) <= set(axes):
            continue  # another sum; one over several axes has the error of the first
        x, parts = call.operand, mesh.axis_size(call.axes)
        pairs = [(info(x).typed[axis], info(error).typed[axis]) for axis, size in mesh.shape.items() if size > 1]
        is_theirs = all((its in (State.VARYING, State.UNREDUCED)) == (own is State.VARYING) for its, own in pairs)
        if not is_theirs or info(x).aval.numel != info(error).aval.numel:
            change_call(each, wire="")  # its axes are summed in another order than the error assumes
            continue
        dim = call.dim if call.kind == "psum_scatter" else -1
        with traced.graph.inserting_before(each):
            change_call(each, operand=traced.call(WITH_ERROR, (x, error, scale), info(x)))
            form = call.wire.partition(_THEN)[0]
            error = traced.call(UNSENT, (x, error, scale, parts, dim, form, beta), info(node))
    return error


class _SentCall:
    """Lowers one call at the insertion point of the graph. `sent` counts the bytes that a rank sends."""

    def __init__(self, traced: Traced, node: fx.Node, call: CollectiveCall, ranks: int) -> None:
        self.traced, self.call, self.ranks = traced, call, ranks
        self.shape, self.own, self.dtype = info(node).aval.shape, info(call.operand).aval, info(node).aval.dtype
        self.after = info(node)
        varying = self.after.type and info(call.operand).typed.having(call.axes, State.VARYING)
        self.before = self.after._replace(type=varying)
        self.sent = 0
        whole = self.after.nbytes if call.kind == "all_gather" else self.own.nbytes
        self.plain = whole * (ranks - 1) // ranks * (2 if call.kind == "psum" else 1)

    def result(self) -> fx.Node:
        x, runs = self.call.operand, list(self.after.runs)
        if self.call.kind == "all_gather":
            whole = self._gathered(x, runs or [self.own.numel], self.call.wire)
            unpacked = (whole, self.ranks, 0, list(self.own.shape), self.call.dim)
            return self._op(UNPACK, unpacked, self.shape, self.after) if self.call.dim else self._shaped(whole)
        length = self.after.aval.numel
        if self.call.kind == "psum":
            return self._shaped(self._summed(x, runs or [length]))
        if self.call.dim:
            x = self._op(PACK, ([x], self.ranks, [self.call.dim]), (self.own.numel,), self.before)
        return self._shaped(self._scattered(x, runs or [length], self.call.wire, self.after))

    def _summed(self, x: fx.Node, runs: list[int]) -> fx.Node:
        """Sum a flat value: each rank sums its part of every run, and the parts are gathered."""
        scattered, gathered = self.call.wire.split(_THEN)
        parts = [-(-length // self.ranks) for length in runs]
        padded = [part * self.ranks for part in parts]
        if len(runs) > 1 or runs != padded:
            x = x if len(self.shape) == 1 else self._op(PACK, ([x], 1, [0]), (self.own.numel,), self.before)
            begins, values = [0, *accumulate(runs)], []
            for begin, length, whole in zip(begins, runs, padded, strict=False):
                run = self._op(aten.slice.Tensor, (x, 0, begin, begin + length), (length,), self.before)
                filled = (run, [0, whole - length])
                values.append(self._op(aten.constant_pad_nd.default, filled, (whole,), self.before))
            x = self._op(PACK, (values, self.ranks, [0] * len(runs)), (sum(padded),), self.before)
        total = self._gathered(self._scattered(x, parts, scattered, self.before), parts, gathered)
        if len(runs) == 1 and runs == padded:
            return total
        begins, values = [0, *accumulate(parts)], []
        for begin, length, part in zip(begins, runs, parts, strict=False):
            run = self._op(UNPACK, (total, self.ranks, begin, [part], 0), (part * self.ranks,), self.after)
            values.append(self._op(aten.slice.Tensor, (run, 0, 0, length), (length,), self.after))
        return self._op(aten.cat.default, (values,), (sum(runs),), self.after)

    def _gathered(self, x: fx.Node, runs: list[int], wire: str) -> fx.Node:
        size = wire_bytes(runs, wire, self.dtype)
        packed = self._op(QUANTISE, (x, 1, runs, wire), (size,), self.before, torch.uint8)
        call = CollectiveCall("all_gather", packed, self.call.axes, dim=0, dst=self.call.dst or State.INVARIANT.value)
        sent = self._send(call, size, self.after)
        return self._op(DEQUANTISE, (sent, self.ranks, runs, wire, self.dtype), (sum(runs) * self.ranks,), self.after)

    def _scattered(self, x: fx.Node, runs: list[int], wire: str, known: NodeInfo) -> fx.Node:
        size = wire_bytes(runs, wire, self.dtype)
        packed = self._op(QUANTISE, (x, self.ranks, runs, wire), (size * self.ranks,), self.before, torch.uint8)
        call = CollectiveCall("all_to_all", packed, self.call.axes, split_dim=0, concat_dim=0)
        sent = self._send(call, size, self.before)
        return self._op(DEQUANTISE_SUM, (sent, self.ranks, runs, wire, self.dtype), (sum(runs),), known)

    def _send(self, call: CollectiveCall, size: int, known: NodeInfo) -> fx.Node:
        self.sent += size * (self.ranks - 1)
        aval = replace(self.own, shape=(size * self.ranks,), dtype=torch.uint8)
        return self.traced.emit(call, known._replace(val=aval))

    def _shaped(self, x: fx.Node) -> fx.Node:
        is_flat = len(self.shape) == 1
        return x if is_flat else self._op(aten.view.default, (x, list(self.shape)), self.shape, self.after)

    def _op(
        self,
        target: fx.node.Target,
        args: Args,
        shape: tuple[int, ...],
        known: NodeInfo,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        aval = replace(self.own, shape=tuple(shape), dtype=dtype or self.dtype)
        return self.traced.call(target, args, known._replace(val=aval))
