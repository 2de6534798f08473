"""Extraction of subgraphs as separate programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from sharding_specs import Mesh, P

from ..collectives import Type
from ..ir import Traced, axes_of_nodes, info, operands_of, reached, set_info, update_info
from ..program import Program


@dataclass(frozen=True)
class Subprogram:
    program: Program
    inputs: tuple[fx.Node, ...]  # the values of the full graph that it reads
    outputs: tuple[fx.Node, ...]  # the values of the full graph that it computes


class Extractor:
    """Extracts programs from a graph. An op that is `inline` is repeated in every program that needs its value."""

    def __init__(
        self, traced: Traced, mesh: Mesh, in_specs: list[P], inline: Callable[[fx.Node], bool], hidden: str
    ) -> None:
        self.traced, self.mesh, self.inline, self.hidden = traced, mesh, inline, hidden
        self.position = {node: index for index, node in enumerate(traced.graph.nodes)}
        inputs = {
            node: frozenset(spec.axes | spec.unreduced) for node, spec in zip(traced.inputs, in_specs, strict=True)
        }
        self.axes = {node: axes - {hidden} for node, axes in axes_of_nodes(traced, inputs).items()}
        self._specs: dict[frozenset[str], P] = {}
        self._types: dict[Type, Type] = {}

    def spec(self, node: fx.Node) -> P:
        """Return a spec that states only the axes along which a value differs."""
        axes = self.axes.get(node, frozenset())
        if axes not in self._specs:
            self._specs[axes] = P(unreduced=axes)
        return self._specs[axes]

    def part(
        self,
        nodes: Iterable[fx.Node],
        outputs: Iterable[fx.Node],
        name: str,
        given: Iterable[fx.Node] = (),
        added: Sequence[tuple[fx.Node, Any]] = (),
    ) -> Subprogram:
        """Return a program of these ops. Their other operands become inputs, except if they are repeated.

        `given` are values that are inputs although they could be repeated. `added` has, for each of the last outputs, a
        sum of the graph and the op that adds. The running sum becomes an input, and the output is the running sum plus
        the value.
        """
        wanted, known = list(outputs), set(given)
        members = self.closure([*nodes, *(o for o in wanted if o not in known and self.inline(o))], known)
        order = sorted(members, key=self.position.__getitem__)
        outside = {o for node in order for o in operands_of(node) if o not in members and o.op != "get_attr"}
        outside.update(o for o in wanted if o not in members)
        taken = [*sorted(outside, key=self.position.__getitem__), *(total for total, _ in added)]
        new, values = self._copied(order, taken)
        new.outputs = [values[node] for node in wanted]
        for place, (total, add) in enumerate(added, len(wanted) - len(added)):
            made = new.outputs[place]
            new.outputs[place] = new.graph.call_function(add, (values[total], made))
            if made.op == "call_function":  # add immediately to limit live summands
                made.append(new.outputs[place])
            set_info(new.outputs[place], info(made))
            update_info(values[total], val=info(made).val, type=info(made).type)
        new.seal()
        in_specs = [self.spec(node) for node in taken]
        program = self.program(new, name, taken, in_specs, wanted, [node.name for node in wanted])
        return Subprogram(program, tuple(taken), tuple(wanted))

    def closure(self, nodes: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> set[fx.Node]:
        def repeated(node: fx.Node) -> list[fx.Node]:
            return [o for o in operands_of(node) if o.op == "call_function" and o not in given and self.inline(o)]

        return set(reached(nodes, repeated))

    def _copied(self, order: list[fx.Node], inputs: list[fx.Node]) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        new = Traced(fx.Graph(), constants=self.traced.constants)
        values: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            values[node] = new.graph.placeholder(node.name)
            new.inputs.append(values[node])
        for node in order:
            for operand in operands_of(node):
                if operand.op == "get_attr" and operand not in values:
                    values[operand] = new.graph.get_attr(operand.target)
            values[node] = new.graph.node_copy(node, values.__getitem__)
        for old, copy in values.items():
            self.with_info_of(old, copy)
        return new, values

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
            out_specs=[self.spec(node) for node in outputs],
            in_paths=[str(info(node).path or node.name) for node in inputs],
            out_paths=out_paths,
            name=name,
            cache={"doing": f"runs {name}"},  # the ranks compare the entire pipeline once
        )

    def with_info_of(self, value: fx.Node, new: fx.Node) -> fx.Node:
        """Record for a node outside the full graph the facts about a value that are valid there. Return the node."""
        kept = info(value)._replace(forward_node=None, donated=False, updated_output=None)
        if kept.type is not None:
            here = Type({axis: state for axis, state in kept.type.items() if axis != self.hidden})
            kept = kept._replace(type=self._types.setdefault(here, here))
        set_info(new, kept)
        return new
