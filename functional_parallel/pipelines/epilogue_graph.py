"""Graph of the ops after a pipeline's sums over microbatches: from totals to the step's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from sharding_specs import P

from ..collectives import DimSplit
from ..ir import Traced, first_operand, info, operands_of, the_call, topological_order, update_info
from ..ops import is_move, is_number
from ..passes import combine_op, microbatch_dim, with_dim_size, with_global_size
from ..program import Program, memories_of
from .extract import Extractor
from .roles import OpRole, OpRoles

aten = torch.ops.aten


class EpilogueInput(NamedTuple):
    """Input value of the epilogue: a value in the graph of the step, of one of four kinds.

    "input" is an input of the step, "once" is computed before the pipeline fills, "total" is a sum over a chain's
    microbatches, and "collected" is a per-microbatch value.
    """

    kind: str
    node: fx.Node
    which: int = 0  # the chain of a total, or the microbatch of a collected value


def _compute_in_each_memory(traced: Traced) -> None:
    """Compute what reads nothing, such as zeros, once in each memory that reads it. A part would get it from one."""
    memories, free = memories_of(traced), {node for node in traced.graph.nodes if node.op == "get_attr"}
    for node in traced.nodes:
        if free.issuperset(operands_of(node)) and not is_move(node) and not is_number(node):
            free.add(node)
    for node in reversed([node for node in traced.nodes if node in free]):
        readers = [user for user in node.users if user in memories and not is_move(user)]
        for memory in sorted({memories[user] for user in readers} - {memories[node]}):
            with traced.graph.inserting_before(node):
                copy = traced.add_copy(node, lambda operand: operand, info(node))
            memories[copy] = memory
            for user in readers:
                if memories[user] == memory:
                    user.replace_input_with(node, copy)


class EpilogueGraph:
    def __init__(
        self,
        roles: OpRoles,
        extractor: Extractor,
        program: Program,
        parts: DimSplit,
        chains: int,
        written: Mapping[fx.Node, fx.Node],
    ) -> None:
        self.written = written  # by result, the input that stages have written it into
        self.roles, self.whole, self.parts, self.chains = roles, extractor, parts, chains
        self.in_specs = dict(zip(roles.traced.inputs, program.in_specs, strict=True))
        self.traced = Traced(fx.Graph(), constants=roles.traced.constants)
        self.given: dict[fx.Node, EpilogueInput] = {}
        self.specs: list[P] = []
        self._made: dict[Any, fx.Node] = {}
        for node in roles.traced.inputs:
            self._placeholder(EpilogueInput("input", node), program.in_specs[len(self.specs)].without({roles.axis}))
        inputs = list(self.traced.inputs)
        results = zip(roles.traced.outputs, program.out_specs, strict=True)
        self.traced.outputs = [self._output(output, spec) for output, spec in results]
        self.traced.seal()
        _compute_in_each_memory(self.traced)
        unused = [node for node in self.traced.inputs if not node.users and self.given[node].kind != "input"]
        assert not unused, f"nothing uses {unused[0]}"
        self.links = self._links(inputs, program.in_paths, program.out_paths)

    def _placeholder(self, given: EpilogueInput, spec: P) -> fx.Node:
        if given not in self._made:
            node = self.traced.graph.placeholder(f"{given.kind}_{given.node.name}_{given.which}")
            self.whole.with_info_of(given.node, node)
            if given.kind == "input" and given.node in self.roles.varying:
                dim = microbatch_dim(self.in_specs[given.node], self.roles.axis, given.node.name)
                update_info(node, val=with_global_size(info(given.node).aval, dim, self.parts))
            self.traced.inputs.append(node)
            self.given[node], self._made[given] = given, node
            self.specs.append(spec)
        return self._made[given]

    def _output(self, output: fx.node.Argument, spec: P) -> fx.node.Argument:
        if not isinstance(output, fx.Node):
            return output
        if output in self.written:
            return self._made[EpilogueInput("input", self.written[output])]
        if output.op == "get_attr":  # a result must be an op, which has ranks
            return self._call(aten.clone.default, (self._value(output),), output)
        if self.roles.axis not in spec.axes or output.op == "placeholder":
            return self._value(output)
        return self._side_by_side(output, microbatch_dim(spec, self.roles.axis, "a result"), output, self.parts)

    def _value(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self._made[EpilogueInput("input", node)]
        for each in topological_order(node, self._needed, self._made):
            self._made[each] = self._written(each)
        return self._made[node]

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        if node.op != "call_function" or self._begins(node):
            return []
        return [operand for operand in operands_of(node) if operand.op != "placeholder"]

    def _begins(self, node: fx.Node) -> bool:
        role = self.roles.of[node]
        return role is OpRole.TOTAL or (node in self.roles.late and role in (OpRole.ONCE, OpRole.EARLY))

    def _written(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self.whole.with_info_of(node, self.traced.graph.get_attr(node.target))
        if self.roles.of[node] is OpRole.TOTAL:
            return self._total(node)
        if self._begins(node):
            return self._placeholder(EpilogueInput("once", node), self.whole.spec(node))
        if self.roles.rounds.is_barrier(node):
            return self._multiple(node)
        return self.whole.copied(node, self.traced, self._value)

    def _multiple(self, node: fx.Node) -> fx.Node:
        """Write a sum with the same summand from every microbatch, added in the same order as other sums."""
        total = part = self._value(first_operand(node))
        for _ in range(1, self.parts.ranks):
            total = self._call(aten.add.Tensor, (total, part), node)
        return total

    def _total(self, node: fx.Node) -> fx.Node:
        combine = combine_op(node, self.roles.axis)
        if combine is None:
            call = the_call(node)
            return self._side_by_side(call.operand, call.dims[0], node, DimSplit.of(self.parts.ranks))
        spec = self.whole.spec(node)
        total, *parts = (self._placeholder(EpilogueInput("total", node, i), spec) for i in range(self.chains))
        for part in parts:
            total = self._call(combine, (total, part), node)
        return total

    def _side_by_side(self, node: fx.Node, dim: int, like: fx.Node, parts: DimSplit) -> fx.Node:
        each = [self._collected(node, dim, microbatch, parts) for microbatch in parts]
        joined = self._call(aten.cat.default, (each, dim), like)
        update_info(joined, val=with_global_size(info(node).aval, dim, parts))
        return joined

    def _collected(self, node: fx.Node, dim: int, microbatch: int, parts: DimSplit) -> fx.Node:
        given, aval = EpilogueInput("collected", node, microbatch), info(node).aval
        varies = node in self.roles.varying
        value = self._placeholder(given, self.whole.spec(node)) if varies else self._value(node)
        begin, end = parts.own(microbatch, aval.shape[dim])
        if begin == 0:
            return value
        key = (node, dim, microbatch)
        if key not in self._made:
            self._made[key] = self._call(aten.slice.Tensor, (value, dim, begin, end), node)
            update_info(self._made[key], val=with_dim_size(aval, dim, end - begin))
        return self._made[key]

    def _call(self, target: fx.node.Target, args: tuple[fx.node.Argument, ...], like: fx.Node) -> fx.Node:
        return self.traced.call(target, args, self.whole.info_of(like))

    def _links(self, inputs: list[fx.Node], in_paths: Sequence[str], out_paths: Sequence[str]) -> dict[int, fx.Node]:
        by_path = {(path, info(node).val): node for path, node in zip(in_paths, inputs, strict=True)}
        found = {}
        for index, (path, output) in enumerate(zip(out_paths, self.traced.outputs, strict=True)):
            if isinstance(output, fx.Node) and (path, info(output).val) in by_path:
                found[index] = by_path[path, info(output).val]
        return found
