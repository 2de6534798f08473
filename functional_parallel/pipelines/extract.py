"""Extraction of subgraphs as separate programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from sharding_specs import Mesh, P

from ..collectives import Type
from ..ir import NodeInfo, Traced, axes_of_nodes, info, operands_of, reached, set_info, update_info
from ..program import Program, memories_of

Chosen: TypeAlias = tuple[list[fx.Node], list[fx.Node]]  # ops of a program and its inputs, in the order of the graph


@dataclass(frozen=True, eq=False)
class Subprogram:
    program: Program
    inputs: tuple[fx.Node, ...]  # the values of the full graph that it reads
    outputs: tuple[fx.Node, ...]  # the values of the full graph that it computes


class Extractor:
    """Extracts programs from a graph. An op that is `inline` is repeated in every program that needs its value."""

    def __init__(
        self, traced: Traced, mesh: Mesh, in_specs: list[P], inline: Callable[[fx.Node], bool], hidden: str
    ) -> None:
        self.traced, self.mesh, self.hidden = traced, mesh, hidden
        self.position = {node: index for index, node in enumerate(traced.graph.nodes)}
        self.repeated = {node for node in traced.nodes if inline(node)}
        self.repeats = {node: [o for o in operands_of(node) if o in self.repeated] for node in traced.nodes}
        inputs = {
            node: frozenset(spec.axes | spec.unreduced) for node, spec in zip(traced.inputs, in_specs, strict=True)
        }
        self.axes = {node: axes - {hidden} for node, axes in axes_of_nodes(traced, inputs).items()}
        self._specs: dict[frozenset[str], P] = {}
        self._types: dict[Type, Type] = {}
        self._infos: dict[fx.Node, NodeInfo] = {}
        self.memories = memories_of(traced)

    def spec(self, node: fx.Node) -> P:
        """Return a spec that states only the axes of a varying value."""
        axes = self.axes.get(node, frozenset())
        if axes not in self._specs:
            self._specs[axes] = P(unreduced=axes)
        return self._specs[axes]

    def select(self, nodes: Iterable[fx.Node], outputs: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> Chosen:
        """Select ops, with the repeated ops that they need, and their other operands, which become inputs.

        `given` are values that are inputs although they could be repeated.
        """
        wanted = list(outputs)
        members = self.closure([*nodes, *(o for o in wanted if o in self.repeated and o not in given)], given)
        outside = {o for node in members for o in operands_of(node) if o not in members and o.op != "get_attr"}
        outside.update(o for o in wanted if o not in members)
        order = self.position.__getitem__
        return sorted(members, key=order), sorted(outside, key=order)

    def closure(self, nodes: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> set[fx.Node]:
        return set(reached(nodes, lambda node: [o for o in self.repeats[node] if o not in given]))

    def write(
        self, chosen: Chosen, outputs: Sequence[fx.Node], name: str, added: Sequence[tuple[fx.Node, Any]] = ()
    ) -> Subprogram:
        """Return the program of a selection.

        `added` has, for each of the last outputs, a sum of the graph and the op that adds. The running sum becomes an
        input, and the output is the running sum plus the value.
        """
        order, inputs = chosen[0], [*chosen[1], *(total for total, _ in added)]
        new, values = self._copied(order, inputs)
        new.outputs = [values[node] for node in outputs]
        for place, (total, add) in enumerate(added, len(outputs) - len(added)):
            made = new.outputs[place]
            new.outputs[place] = new.graph.call_function(add, (values[total], made))
            if made.op == "call_function":  # add immediately to limit live summands
                made.append(new.outputs[place])
            set_info(new.outputs[place], info(made))
            update_info(values[total], val=info(made).val, type=info(made).type)
        new.seal()
        in_specs = [self.spec(node) for node in inputs]
        program = self.program(new, name, inputs, in_specs, outputs, [node.name for node in outputs])
        return Subprogram(program, tuple(inputs), tuple(outputs))

    def _copied(self, order: list[fx.Node], inputs: list[fx.Node]) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        new = Traced(fx.Graph(), constants=self.traced.constants)
        values: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            values[node] = self.with_info_of(node, new.graph.placeholder(node.name))
            new.inputs.append(values[node])
        for node in order:
            for operand in operands_of(node):
                if operand not in values:  # a constant
                    values[operand] = self.with_info_of(operand, new.graph.get_attr(operand.target))
            values[node] = self.copied(node, new, values.__getitem__)
        return new, values

    def copied(self, node: fx.Node, new: Traced, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Copy an op to the end of another graph, with its operands there. Return the copy."""
        return new.add_copy(node, operand, self.info_of(node))

    def program(
        self,
        traced: Traced,
        name: str,
        inputs: Sequence[fx.Node],
        in_specs: list[P],
        outputs: Sequence[fx.Node],
        out_paths: list[str],
    ) -> Program:
        return Program(
            traced,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=[self._returned(node) for node in outputs],
            in_paths=[str(info(node).path or node.name) for node in inputs],
            out_paths=out_paths,
            name=name,
            cache={"doing": f"runs {name}"},  # the ranks compare the entire pipeline once
        )

    def _returned(self, node: fx.Node) -> P:
        memory = self.memories.get(node, "device")
        return self.spec(node) if memory == "device" else self.spec(node).replace(storage={"memory": memory})

    def info_of(self, value: fx.Node) -> NodeInfo:
        """Return the facts about a value that are valid outside the full graph."""
        if value not in self._infos:
            known = info(value)._replace(forward_node=None, donated=False, updated_output=None)
            if (whole := known.type) is not None:
                if whole not in self._types:
                    here = Type({axis: state for axis, state in whole.items() if axis != self.hidden})
                    self._types[whole] = self._types.setdefault(here, here)
                known = known._replace(type=self._types[whole])
            self._infos[value] = known
        return self._infos[value]

    def with_info_of(self, value: fx.Node, new: fx.Node) -> fx.Node:
        """Record for a node outside the full graph the facts about a value that are valid there. Return the node."""
        known, memory = self.info_of(value), self.memories[value]
        is_known = value.op == "placeholder" or memory == "device"
        set_info(new, known if is_known else known._replace(spec=P(memory=memory)))
        return new
