"""Unroll microbatches: a virtual mesh axis. Its ranks are run sequentially by a single rank.

A function partitioned over the axis `microbatch` has the types and collectives of any other axis. They define the
values that each microbatch computes separately, and the values that are summed over all. This module removes the axis
from the program. The ops of the microbatches follow each other, and a sum over the axis becomes a running sum. Values
that do not depend on the microbatch are computed once.

`rounds` defines the order of the ops, and the ops that run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import P

from ...collectives import DimSplit, Type
from ...errors import UnrollError
from ...ir import (
    Aval,
    NodeInfo,
    Traced,
    collective_call,
    first_operand,
    info,
    operands_of,
    primitive_name,
    set_info,
    the_call,
    update_info,
)
from ..program_pass import Phase, ProgramPass, Settings, Unit
from .rounds import MicrobatchRounds, names_axis

aten = torch.ops.aten

_COMBINE = {
    "psum": aten.add.Tensor,
    "psum_scatter": aten.add.Tensor,
    "pmax": aten.maximum.default,
    "pmin": aten.minimum.default,
}


@dataclass(frozen=True)
class UnrollMicrobatches(ProgramPass):
    """Let the ops of the microbatches follow each other, and replace sums over microbatches by running sums."""

    axis: str
    name: ClassVar[str] = "microbatches"
    phase: ClassVar[Phase] = Phase.CUT
    is_required: ClassVar[bool] = True

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls(axis) for axis in settings.splits if settings.pipelined is None]

    def rewrite(self, unit: Unit) -> None:
        program, split = unit.program, unit.settings.splits[self.axis]
        if split.ranks > 1:
            replicated = unit.settings.per_microbatch(program.traced)
            program.traced = unroll(program.traced, self.axis, split, program.in_specs, program.out_specs, replicated)
        program.in_specs = [spec.without({self.axis}) for spec in program.in_specs]
        program.out_specs = [spec.without({self.axis}) for spec in program.out_specs]


def unroll(
    traced: Traced,
    axis: str,
    parts: DimSplit,
    in_specs: list[P],
    out_specs: list[P],
    replicated: Collection[fx.Node] = (),
) -> Traced:
    """Remove a virtual axis from a graph at the shapes of one microbatch. Its inputs and results then hold all of them.

    `replicated` are values that do not depend on the microbatch, but are recomputed for each, so that they are not kept
    between microbatches: gathered parameters.
    """
    return _Unroll(traced, axis, parts, in_specs, out_specs, set(replicated)).result


class _Unroll:
    def __init__(
        self,
        traced: Traced,
        axis: str,
        parts: DimSplit,
        in_specs: list[P],
        out_specs: list[P],
        replicated: set[fx.Node],
    ) -> None:
        self.old, self.axis, self.parts, self.size, self.replicated = traced, axis, parts, parts.ranks, replicated
        self.graph = fx.Graph()
        self.once: dict[fx.Node, fx.Node] = {}
        self.own: list[dict[fx.Node, fx.Node]] = [{} for _ in parts]
        self.result = Traced(self.graph, constants=dict(traced.constants))
        self.microbatches = MicrobatchRounds(traced, axis, in_specs)
        self.varying, self._is_barrier = self.microbatches.varying, self.microbatches.is_barrier
        self._inputs(in_specs)
        self._rounds()
        outputs = zip(traced.outputs, out_specs, strict=True)
        self.result.outputs = [self._output(output, spec) for output, spec in outputs]
        self.result.seal()
        for node in self.graph.nodes:
            if (known := info(node).type) is not None:
                update_info(node, type=Type({name: state for name, state in known.items() if name != axis}))

    def _inputs(self, in_specs: list[P]) -> None:
        for node, spec in zip(self.old.inputs, in_specs, strict=True):
            new = self.graph.placeholder(node.name)
            set_info(new, info(node))
            self.result.inputs.append(new)
            if node not in self.varying:
                self.once[node] = new
                continue
            dim = microbatch_dim(spec, self.axis, str(info(node).path or node.name))
            aval = info(node).aval
            update_info(new, val=with_global_size(aval, dim, self.parts))
            for number in range(self.size):
                bounds = (dim, *self.parts.held(number, aval.shape[dim]))
                self.own[number][node] = self.result.call(aten.slice.Tensor, (new, *bounds), info(node))
        for node in self.old.graph.nodes:
            if node.op == "get_attr":
                new = self.once[node] = self.graph.get_attr(node.target)
                set_info(new, info(node))

    def _rounds(self) -> None:
        rounds = self.microbatches.of
        by_round: dict[int, list[fx.Node]] = {}
        for node in self.old.nodes:
            by_round.setdefault(rounds[node], []).append(node)
        for number in sorted(by_round):
            for node in by_round[number]:
                if node not in self.varying and not self._is_barrier(node):
                    self._copy_once(node)
            members = [node for node in by_round[number] if node in self.varying or self._is_barrier(node)]
            for microbatch in range(self.size):
                for node in members:
                    self._copy_own(node, microbatch)
            for node in members:
                if self._is_barrier(node):
                    self._close(node)

    def _copy_once(self, node: fx.Node) -> fx.Node:
        if node not in self.once:
            for operand in operands_of(node):
                if operand not in self.once:
                    self._copy_once(operand)
            self.once[node] = self._copy(node, self.once)
        return self.once[node]

    def _copy_own(self, node: fx.Node, microbatch: int) -> None:
        own = self.own[microbatch]
        for operand in operands_of(node):
            self._provide(operand, microbatch)
        call = collective_call(node) if names_axis(node, self.axis) else None
        if self._is_barrier(node):
            self._accumulate(node, microbatch)
        elif call is None:
            own[node] = self._copy(node, own)
        elif call.kind == "axis_index":
            own[node] = self._constant(torch.tensor(microbatch, device="cpu"), node)
        elif call.kind == "pscatter":
            own[node] = self._part(own[call.operand], node, microbatch)
        else:
            own[node] = own[call.operand]  # a cast

    def _provide(self, value: fx.Node, microbatch: int) -> None:
        own = self.own[microbatch]
        if value in own:
            return
        if value in self.replicated:
            for operand in operands_of(value):
                self._provide(operand, microbatch)
            own[value] = self._copy(value, own)
        else:
            own[value] = self._copy_once(value) if value.op == "call_function" else self.once[value]

    def _accumulate(self, node: fx.Node, microbatch: int) -> None:
        combine = combine_op(node, self.axis)
        if combine is None:
            return
        value = self.own[microbatch][first_operand(node)]
        known = info(node)._replace(val=info(value).val)
        self.once[node] = value if microbatch == 0 else self.result.call(combine, (self.once[node], value), known)

    def _close(self, node: fx.Node) -> None:
        call = the_call(node)
        if call.kind == "all_gather":
            parts = [own[call.operand] for own in self.own]
            self.once[node] = self.result.call(aten.cat.default, (parts, call.dim), info(node))
        elif call.kind == "psum_scatter":
            for microbatch, own in enumerate(self.own):
                own[node] = self._part(self.once[node], node, microbatch)

    def _part(self, value: fx.Node, node: fx.Node, microbatch: int) -> fx.Node:
        return self.result.call(aten.slice.Tensor, (value, *bounds_of_part(node, microbatch)), info(node))

    def _constant(self, value: torch.Tensor, node: fx.Node) -> fx.Node:
        name = f"microbatch_{int(value)}"
        self.result.constants[name] = value
        new = self.graph.get_attr(name)
        set_info(new, info(node))
        return new

    def _copy(self, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node:
        return self.result.add_copy(node, lambda a: values[a] if a in values else self.once[a], info(node))

    def _output(self, output: fx.node.Argument, spec: P) -> fx.node.Argument:
        if not isinstance(output, fx.Node):
            return output
        if self.axis not in spec.axes:
            return self._copy_once(output) if output.op == "call_function" else self.once[output]
        dim = microbatch_dim(spec, self.axis, "a result")
        aval = info(output).aval
        for number in range(self.size):  # a result that is equal for all microbatches gets a copy for each
            self._provide(output, number)
        parts = [self._own_part(own[output], dim, number, info(output)) for number, own in enumerate(self.own)]
        return self.result.call(
            aten.cat.default, (parts, dim), info(output)._replace(val=with_global_size(aval, dim, self.parts))
        )

    def _own_part(self, value: fx.Node, dim: int, microbatch: int, known: NodeInfo) -> fx.Node:
        begin, end = self.parts.own(microbatch, known.aval.shape[dim])
        if begin == 0:
            return value
        known = known._replace(val=with_dim_size(known.aval, dim, end - begin))
        return self.result.call(aten.slice.Tensor, (value, dim, begin, end), known)


def microbatch_dim(spec: P, axis: str, where: str) -> int:
    for dim, factors in enumerate(spec.dims):
        if axis in factors:
            if not all(isinstance(factor, str) for factor in factors[: factors.index(axis)]):
                raise UnrollError(f"{where}: {spec!r} splits an inner factor of dim {dim} into microbatches")
            return dim
    raise UnrollError(f"{where}: {spec!r} does not say which dim holds the microbatches")


def bounds_of_part(node: fx.Node, microbatch: int) -> tuple[int, int, int]:
    (dim,) = the_call(node).dims
    length = info(node).aval.shape[dim]
    return dim, microbatch * length, (microbatch + 1) * length


def combine_op(node: fx.Node, axis: str) -> torch._ops.OpOverload | None:
    name = primitive_name(node)
    if name == "all_gather":
        return None
    if name not in _COMBINE:
        raise UnrollError(
            f"{info(node).source}: {name} over {axis!r} moves values between microbatches, which run one "
            "after another; split the batch over an axis of the mesh instead"
        )
    return _COMBINE[name]


def with_global_size(aval: Aval, dim: int, parts: DimSplit) -> Aval:
    return with_dim_size(aval, dim, parts.whole(aval.shape[dim]))


def with_dim_size(aval: Aval, dim: int, length: int) -> Aval:
    return Aval((*aval.shape[:dim], length, *aval.shape[dim + 1 :]), aval.dtype, aval.device)
