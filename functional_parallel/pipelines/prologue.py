"""Programs before the pipeline fills: slices of the batch for each microbatch, and values that microbatches share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import P

from ..collectives import DimSplit
from ..ir import Traced, first_operand, info, operands_of, primitive_name, the_call, topological_order, update_info
from ..passes import bounds_of_part, combine_op, microbatch_dim, names_axis, with_global_size
from ..program import Program
from .extract import Extractor
from .roles import OpRoles

aten = torch.ops.aten

PrologueOutput = tuple[fx.Node, int | None]  # a value and its microbatch; None if all microbatches share the value


@dataclass(frozen=True)
class Prologue:
    program: Program
    inputs: tuple[fx.Node, ...]  # the step's inputs that it reads
    outputs: tuple[PrologueOutput, ...]  # the values that it computes


class PrologueBuilder:
    def __init__(
        self,
        roles: OpRoles,
        extractor: Extractor,
        in_specs: list[P],
        parts: DimSplit,
        inputs: Collection[fx.Node],
        wanted: Iterable[PrologueOutput],
    ) -> None:
        self.roles, self.extractor, self.parts = roles, extractor, parts
        self.in_specs = dict(zip(roles.traced.inputs, in_specs, strict=True))
        self.new = Traced(fx.Graph(), constants=dict(roles.traced.constants))
        self.inputs: list[fx.Node] = []
        self.outputs = tuple(wanted)
        self._made: dict[PrologueOutput, fx.Node] = {}
        self._placeholders(inputs)
        self.new.outputs = [self.value(node, microbatch) for node, microbatch in self.outputs]
        self.new.seal()

    def build(self, name: str) -> Prologue:
        in_specs = [self.in_specs[node].without({self.roles.axis}) for node in self.inputs]
        outputs = [node for node, _ in self.outputs]
        paths = [node.name if m is None else f"{node.name} of microbatch {m}" for node, m in self.outputs]
        program = self.extractor.program(self.new, name, self.inputs, in_specs, outputs, paths)
        return Prologue(program, tuple(self.inputs), self.outputs)

    def value(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        """Return a value of one microbatch or a shared value. It is written on the first request."""
        wanted = self._key(node, microbatch)
        for key in topological_order(wanted, self._needed, self._made):
            self._made[key] = self._write_value(*key)
        return self._made[wanted]

    def _key(self, node: fx.Node, microbatch: int | None) -> PrologueOutput:
        return node, microbatch if node in self.roles.varying else None

    def _needed(self, key: PrologueOutput) -> list[PrologueOutput]:
        node, microbatch = key
        if self.roles.rounds.is_barrier(node):
            return [self._key(first_operand(node), each) for each in self.parts]
        return [self._key(operand, microbatch) for operand in operands_of(node)]

    def _write_value(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        if node.op == "get_attr":
            return self.extractor.with_info_of(node, self.new.graph.get_attr(node.target))
        if self.roles.rounds.is_barrier(node):
            return self._joined(node, microbatch)
        if microbatch is None:
            return self._copy(node, None)
        if node.op == "placeholder":
            dim = self._dim(node)
            bounds = self.parts.held(microbatch, info(node).aval.shape[dim])
            return self._call(aten.slice.Tensor, (self._made[node, None], dim, *bounds), node)
        kind = primitive_name(node) if names_axis(node, self.roles.axis) else None
        if kind == "axis_index":
            constant = f"microbatch_{microbatch}"
            self.new.constants[constant] = torch.tensor(microbatch, device="cpu")
            return self.extractor.with_info_of(node, self.new.graph.get_attr(constant))
        if kind == "pscatter":
            return self._part(self.value(first_operand(node), None), node, microbatch)
        return self._copy(node, microbatch)

    def _joined(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        parts = [self.value(first_operand(node), each) for each in self.parts]
        combine = combine_op(node, self.roles.axis)
        if combine is None:
            return self._call(aten.cat.default, (parts, the_call(node).dim), node)
        total = parts[0]
        for part in parts[1:]:
            total = self._call(combine, (total, part), node)
            update_info(total, val=info(part).val)
        return total if microbatch is None else self._part(total, node, microbatch)

    def _part(self, whole: fx.Node, node: fx.Node, microbatch: int) -> fx.Node:
        return self._call(aten.slice.Tensor, (whole, *bounds_of_part(node, microbatch)), node)

    def _copy(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        return self.extractor.copied(node, self.new, lambda operand: self.value(operand, microbatch))

    def _call(self, target: fx.node.Target, args: tuple[fx.node.Argument, ...], like: fx.Node) -> fx.Node:
        return self.new.call(target, args, self.extractor.info_of(like))

    def _placeholders(self, inputs: Collection[fx.Node]) -> None:
        for node in filter(inputs.__contains__, self.roles.traced.inputs):
            new = self.extractor.with_info_of(node, self.new.graph.placeholder(node.name))
            if node in self.roles.varying:
                update_info(new, val=with_global_size(info(node).aval, self._dim(node), self.parts))
            self.inputs.append(node)
            self.new.inputs.append(new)
            self._made[node, None] = new

    def _dim(self, node: fx.Node) -> int:
        return microbatch_dim(self.in_specs[node], self.roles.axis, str(info(node).path or node.name))
