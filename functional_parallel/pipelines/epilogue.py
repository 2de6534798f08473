"""After the pipeline has drained: sums of gradients become updates, each on the ranks that hold the parameter.

What follows from the sums over microbatches is one graph, whose values start out on different ranks: a parameter and
its gradient where its stage runs, a loss on the last. An op runs where all its operands are. One whose operands never
meet, such as the sum of a tied weight's two gradients or of all gradients' squares, has them exchanged first, and then
runs on every rank that wants its result, so that all of them get the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from sharding_specs import P

from ..collectives.parts import Parts
from ..program.sharing import aliases_of, root_of
from ..program.unroll import combined_by, microbatch_dim, resized, shortened
from ..tracing import Aval, Traced
from ..tracing.graph import in_order, operands_of, primitive_name
from .extract import Extractor, Part
from .roles import Role, Roles, is_view

__all__ = ["Epilogue", "Exchange", "Given"]

aten = torch.ops.aten

_SMALL = 64  # elements: what costs a message and no more

Ranks = frozenset[int]


class Given(NamedTuple):
    """A value that the epilogue begins with.

    kind is "input" (of the step), "once" (made before the pipeline filled), "total" (a sum over a chain's
    microbatches; `which` is the chain) or "collected" (a microbatch's own value; `which` is the microbatch).
    """

    kind: str
    node: fx.Node
    which: int = 0


class Exchange(NamedTuple):
    """A value that one rank of the pipeline sends to another."""

    node: fx.Node
    source: int
    target: int


@dataclass(frozen=True)
class Epilogue:
    """What runs after the pipeline, in levels, with exchanges between them.

    Attributes:
        given: per value that it begins with, what that is.
        parts: per level, per rank, the program.
        exchanges: per level, what is sent after it.
        outputs: the step's results.
        replaces: for a result that takes the place of an input, as a new parameter does, that input of the step.
        output_holders: per result of the step, the ranks that hold it.
        output_specs: per result of the step, along which axes it differs as it was made. Its spec may name more: a
            gradient that is zero whatever the batch lies sharded, though all shards are the same.
    """

    given: dict[fx.Node, Given]
    parts: tuple[dict[int, Part], ...]
    exchanges: tuple[tuple[Exchange, ...], ...]
    outputs: tuple[fx.Node, ...]
    replaces: dict[fx.Node, fx.Node]
    output_holders: tuple[Ranks, ...]
    output_specs: tuple[P, ...]


class EpilogueBuilder:
    """Builds it.

    Args:
        roles: the roles of the step's ops.
        extractor: for the step's graph.
        in_specs, out_specs: how the step's inputs and results lie, microbatches included.
        in_paths, out_paths: their pytree paths; a result at the path of an input takes its place.
        parts: into which microbatches the batch is cut.
        ranks_of_total: per sum over microbatches, per chain, the rank that adds it up.
        rank_of_collected: for a value and a microbatch, the rank that has it.
        used: per rank, the inputs that its stages take.
        name: of the function.
        apart: whether ranks end by themselves, and exchange nothing that no other needs.
    """

    def __init__(
        self,
        roles: Roles,
        extractor: Extractor,
        in_specs: list[P],
        out_specs: list[P],
        in_paths: Sequence[str],
        out_paths: Sequence[str],
        parts: Parts,
        ranks_of_total: Any,
        rank_of_collected: Any,
        used: Sequence[Collection[fx.Node]],
        name: str,
        apart: bool,
    ) -> None:
        self.apart = apart
        self.roles, self.whole, self.parts, self.name = roles, extractor, parts, name
        self.ranks = frozenset(range(len(used)))
        self.ranks_of_total, self.rank_of_collected, self.used = ranks_of_total, rank_of_collected, used
        self.in_specs = dict(zip(roles.traced.inputs, in_specs, strict=True))
        self.new = Traced(fx.Graph(), constants=roles.traced.constants)
        self.given: dict[fx.Node, Given] = {}
        self.specs: list[P] = []
        self._made: dict[Any, fx.Node] = {}
        for node in roles.traced.inputs:
            self._placeholder(Given("input", node), in_specs[len(self.specs)].without({roles.axis}))
        inputs = list(self.new.inputs)
        self.new.outputs = [self._output(out, spec) for out, spec in zip(roles.traced.outputs, out_specs, strict=True)]
        self._seal()
        self.extractor = Extractor(self.new, extractor.mesh, self.specs, lambda _: False, roles.axis)
        self.links = self._links(inputs, in_paths, out_paths)
        once = [given.node for given in self.given.values() if given.kind == "once"]
        self.kept = {root_of(node) for node in once}  # in whose memory something else may lie
        self._place_until_it_holds()
        self._levels()

    # --- the graph ---

    def _placeholder(self, given: Given, spec: P) -> fx.Node:
        if given not in self._made:
            node = self.new.graph.placeholder(f"{given.kind}_{given.node.name}_{given.which}")
            node.meta = self.whole.clean(given.node.meta)
            if given.kind == "input" and given.node in self.roles.varying:
                dim = microbatch_dim(self.in_specs[given.node], self.roles.axis, given.node.name)
                node.meta["val"] = resized(given.node.meta["val"], dim, self.parts)
            self.new.inputs.append(node)
            self.given[node], self._made[given] = given, node
            self.specs.append(spec)
        return self._made[given]

    def _output(self, output: Any, spec: P) -> Any:
        if not isinstance(output, fx.Node):
            return output
        if output.op == "get_attr":  # a result must be some op's, which says on which ranks it is
            return self._with_meta(self.new.graph.call_function(aten.clone.default, (self._value(output),)), output)
        if self.roles.axis not in spec.axes or output.op == "placeholder":
            return self._value(output)
        return self._side_by_side(output, microbatch_dim(spec, self.roles.axis, "a result"), output, self.parts)

    def _value(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self._made[Given("input", node)]
        for each in in_order(node, self._needed, self._made):
            self._made[each] = self._written(each)
        return self._made[node]

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """What must have been written before an op that is copied."""
        if node.op != "call_function" or self._begins(node):
            return []
        return [operand for operand in operands_of(node) if operand.op != "placeholder"]

    def _begins(self, node: fx.Node) -> bool:
        """Whether the epilogue is given this value."""
        role = self.roles.of[node]
        return role is Role.TOTAL or (node in self.roles.late and role in (Role.ONCE, Role.EARLY))

    def _written(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._with_meta(self.new.graph.get_attr(node.target), node)
        if self.roles.of[node] is Role.TOTAL:
            return self._total(node)
        if self._begins(node):
            return self._placeholder(Given("once", node), self.whole.spec(node))
        if self.roles.rounds.is_barrier(node):
            return self._multiple(node)
        return self._with_meta(self.new.graph.node_copy(node, self._value), node)

    def _multiple(self, node: fx.Node) -> fx.Node:
        """A sum to which every microbatch brings the same, added up as others are."""
        total = part = self._value(node.args[0])
        for _ in range(1, self.parts.ranks):
            total = self._with_meta(self.new.graph.call_function(aten.add.Tensor, (total, part)), node)
        return total

    def _total(self, node: fx.Node) -> fx.Node:
        combine = combined_by(node, self.roles.axis)
        if combine is None:
            return self._side_by_side(node.args[0], node.args[2], node, Parts.of(self.parts.ranks))
        parts = [
            self._placeholder(Given("total", node, chain), self.whole.spec(node))
            for chain in range(len(self.ranks_of_total(node)))
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self._with_meta(self.new.graph.call_function(combine, (total, part)), node)
        return total

    def _side_by_side(self, node: fx.Node, dim: int, like: fx.Node, parts: Parts) -> fx.Node:
        each = [self._collected(node, dim, microbatch, parts) for microbatch in parts]
        joined = self._with_meta(self.new.graph.call_function(aten.cat.default, (each, dim)), like)
        joined.meta["val"] = resized(node.meta["val"], dim, parts)
        return joined

    def _collected(self, node: fx.Node, dim: int, microbatch: int, parts: Parts) -> fx.Node:
        """Of a microbatch's value what no other microbatch before it has."""
        given, aval = Given("collected", node, microbatch), node.meta["val"]
        varies = node in self.roles.varying
        value = self._placeholder(given, self.whole.spec(node)) if varies else self._value(node)
        begin, end = parts.own(microbatch, aval.shape[dim])
        if begin == 0:
            return value
        key = (node, dim, microbatch)
        if key not in self._made:
            args = (value, dim, begin, end)
            self._made[key] = self._with_meta(self.new.graph.call_function(aten.slice.Tensor, args), node)
            self._made[key].meta["val"] = shortened(aval, dim, end - begin)
        return self._made[key]

    def _with_meta(self, new: fx.Node, like: fx.Node) -> fx.Node:
        new.meta = self.whole.clean(like.meta)
        return new

    def _seal(self) -> None:
        self.new.seal()
        for node in list(self.new.inputs):
            if not node.users and self.given[node].kind != "input":
                raise AssertionError(f"nothing uses {node}")

    def _links(self, inputs: list[fx.Node], in_paths: Sequence[str], out_paths: Sequence[str]) -> dict[int, fx.Node]:
        """Per result the input whose place it takes: a new parameter, a new moment."""
        by_path = {(path, node.meta["val"]): node for path, node in zip(in_paths, inputs, strict=True)}
        found = {}
        for index, (path, output) in enumerate(zip(out_paths, self.new.outputs, strict=True)):
            if isinstance(output, fx.Node) and (path, output.meta["val"]) in by_path:
                found[index] = by_path[path, output.meta["val"]]
        return found

    # --- where every value is made ---

    def _place_until_it_holds(self) -> None:
        """A result that takes an input's place must end up wherever the next step will want that input."""
        self.needed: dict[int, Ranks] = {}
        while True:
            self._place()
            needed = {index: self.at[node] | self._users_of(node) for index, node in self.links.items()}
            if all(ranks <= self.needed.get(index, frozenset()) for index, ranks in needed.items()):
                return
            self.needed = {index: ranks | self.needed.get(index, frozenset()) for index, ranks in needed.items()}

    def _place(self) -> None:
        self.met: set[fx.Node] = set()
        self.available: dict[fx.Node, Ranks | None] = {node: self._first_ranks(node) for node in self.new.inputs}
        for node in self.new.nodes:
            self.available[node] = self._meeting(node)
        wanted: dict[fx.Node, set[int]] = {node: set() for node in self.new.graph.nodes}
        for index, output in enumerate(self.new.outputs):
            wanted[output] |= self._wanted_of_output(index, output)
        self.at: dict[fx.Node, Ranks] = {}
        for node in reversed(list(self.new.graph.nodes)):
            if node.op == "output":
                continue
            possible = self.available.get(node) or self.ranks
            here = wanted[node] & possible
            if wanted[node] - here:
                here |= {min(possible)}
            self.at[node] = frozenset(here)
            for operand in operands_of(node):
                wanted[operand] |= here
        self.wanted = {node: frozenset(ranks) for node, ranks in wanted.items()}

    def _first_ranks(self, node: fx.Node) -> Ranks | None:
        kind, value, which = self.given[node]
        if kind == "total":
            return frozenset({self.ranks_of_total(value)[which]})
        if kind == "collected":
            return frozenset({self.rank_of_collected(value, which)})
        if kind == "input" and value.meta.get("parameter"):
            return frozenset(rank for rank, inputs in enumerate(self.used) if value in inputs) or None
        return None

    def _meeting(self, node: fx.Node) -> Ranks | None:
        """The ranks on which an op can run; None for any. What is small, and no parameter, may be sent elsewhere.

        What follows from small values of several ranks, as a norm does, runs on every rank that wants it: one exchange,
        where a chain from rank to rank would take many.
        """
        operands = operands_of(node)
        known = {o: ranks for o in operands if (ranks := self.available.get(o)) is not None}
        fixed = [ranks for operand, ranks in known.items() if not self._may_move(operand)]
        chosen = fixed or list(known.values())
        common = frozenset.intersection(*chosen) if chosen else None
        if fixed:
            return common or frozenset.union(*fixed)
        if common == frozenset() or any(operand in self.met for operand in operands):
            self.met.add(node)
            return None
        return common

    def _may_move(self, node: fx.Node) -> bool:
        return _is_small(node.meta["val"]) and not self._is_of_parameter(node)

    def _is_of_parameter(self, node: fx.Node) -> bool:
        """Whether a value is a parameter, or made of one alone, as the slice that a rank updates."""
        while len(operands := operands_of(node)) == 1:
            (node,) = operands
        given = self.given.get(node)
        return given is not None and given.kind == "input" and bool(given.node.meta.get("parameter"))

    def _wanted_of_output(self, index: int, output: fx.Node) -> Ranks:
        possible = self.available.get(output)
        if index in self.links:
            kept = self.available[self.links[index]] or possible or self.ranks
            return kept | self.needed.get(index, frozenset())
        if output.meta["val"].numel == 1 and not self.apart:
            return self.ranks  # with the exchange that there is, instead of a broadcast later
        return frozenset({min(possible or self.ranks)})

    # --- when ---

    def _levels(self) -> None:
        self.level: dict[tuple[fx.Node, int], int] = {}
        for node in self.new.graph.nodes:
            for rank in self.at.get(node, ()):
                self.level[node, rank] = max((self._arrives(o, rank) for o in operands_of(node)), default=0)
        self._slices_late()
        self.count = max(self.level.values(), default=0) + 1

    def _slices_late(self) -> None:
        """A view or a slice of an input is taken where it is used: an update sees what it may write into."""
        for node in reversed(list(self.new.nodes)):
            if not (is_view(node) or primitive_name(node) == "pscatter") or self.wanted[node] - self.at[node]:
                continue
            for rank in self.at[node]:
                users = [self.level[user, rank] for user in node.users if (user, rank) in self.level]
                if users and node not in self.new.outputs:
                    self.level[node, rank] = min(users)

    def _arrives(self, node: fx.Node, rank: int) -> int:
        here = self.level.get((node, rank))
        return self.level[node, min(self.at[node])] + 1 if here is None else here

    def build(self) -> Epilogue:
        exchanges: list[list[Exchange]] = [[] for _ in range(self.count)]
        for node in self.new.graph.nodes:
            if node.op == "output":
                continue
            for target in sorted(self.wanted[node] - self.at[node]):
                source = min(self.at[node])
                exchanges[self.level[node, source]].append(Exchange(node, source, target))
        parts = tuple({r: p for r in sorted(self.ranks) if (p := self._part(r, level))} for level in range(self.count))
        outputs = tuple(self.new.outputs)
        return Epilogue(
            self.given,
            parts,
            tuple(tuple(each) for each in exchanges),
            outputs,
            {outputs[index]: self.given[node].node for index, node in self.links.items()},
            tuple(self.at[node] | self.wanted[node] for node in outputs),
            tuple(self.extractor.spec(node) for node in outputs),
        )

    def _users_of(self, node: fx.Node) -> Ranks:
        return frozenset(rank for rank, inputs in enumerate(self.used) if self.given[node].node in inputs)

    def _part(self, rank: int, level: int) -> Part | None:
        nodes = [node for node in self.new.nodes if self.level.get((node, rank)) == level]
        if not nodes:
            return None
        members, sent = set(nodes), {node for node in self.new.graph.nodes if self._is_sent(node, rank)}
        leaving = [
            node
            for node in nodes
            if node in self.new.outputs or node in sent or any(self._uses_later(u, rank, members) for u in node.users)
        ]
        part = self.extractor.part(nodes, leaving, f"{self.name}: after the pipeline, rank {rank}, level {level}")
        self._donate(part, rank, level)
        return part

    def _donate(self, part: Part, rank: int, level: int) -> None:
        """Say of a part's inputs whether it may write into them, and which of its results takes their place."""
        becomes = {self.links[index]: node for index, node in enumerate(self.new.outputs) if index in self.links}
        for node, placeholder in zip(part.inputs, part.program.traced.inputs, strict=True):
            new = becomes.get(node)
            placeholder.meta["donated"] = self._may_be_overwritten(node, rank, level)
            placeholder.meta["becomes"] = part.outputs.index(new) if new in part.outputs else None

    def _may_be_overwritten(self, node: fx.Node, rank: int, level: int) -> bool:
        """Whether an input was given up, and nothing after this level, and no other rank, asks for what lies there."""
        given = self.given.get(node)
        if given is None or given.kind != "input" or not given.node.meta.get("donated") or given.node in self.kept:
            return False
        aliases = aliases_of(node)
        users = [user for alias in aliases for user in alias.users if user.op != "output" and rank in self.at[user]]
        return (
            not any(alias in self.new.outputs for alias in aliases)
            and not any(self.wanted[alias] - self.at[alias] for alias in aliases)
            and all(self.level[user, rank] <= level for user in users)
        )

    def _is_sent(self, node: fx.Node, rank: int) -> bool:
        return (
            node.op != "output" and min(self.at[node], default=-1) == rank and bool(self.wanted[node] - self.at[node])
        )

    def _uses_later(self, user: fx.Node, rank: int, members: set[fx.Node]) -> bool:
        return user.op != "output" and rank in self.at[user] and user not in members


def _is_small(aval: Any) -> bool:
    return isinstance(aval, Aval) and aval.numel <= _SMALL
