"""Programs after the pipeline has drained: they turn sums of gradients into updates.

All ops that depend on the sums over microbatches are one graph. An op runs on the ranks that hold all its operands. If
no rank holds all of them, they are exchanged first, and every rank that needs the result runs the op. Examples are the
sum of a tied weight's two gradients and the sum of all gradients' squares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from sharding_specs import P

from ..ir import Aval, info, operands_of, primitive_name, update_info
from ..ops import is_move
from ..program import aliases_of, memories_of, storage_root, view_base
from .epilogue_graph import EpilogueGraph, EpilogueInput
from .extract import Extractor, Subprogram

_SMALL = 64  # elements: the cost of sending them is only latency

RankSet = frozenset[int]


class Transfer(NamedTuple):
    node: fx.Node
    source: int
    target: int

    @property
    def phase(self) -> str:
        return info(self.node).phase or "update"


@dataclass(frozen=True)
class Epilogue:
    """Programs that run after the pipeline, in levels. `output_specs` have the axes of varying results."""

    given: dict[fx.Node, EpilogueInput]  # origin of each input
    parts: tuple[dict[int, Subprogram], ...]  # for each level, the program of each rank
    exchanges: tuple[tuple[Transfer, ...], ...]  # for each level, the values that are sent after it
    outputs: tuple[fx.Node, ...]  # the step's results
    replaces: dict[fx.Node, fx.Node]  # result → the input of the step that it replaces, like a new parameter
    output_holders: tuple[RankSet, ...]  # for each result of the step, the ranks that hold it
    output_specs: tuple[P, ...]


class EpiloguePlacement:
    """Assigns ranks to the ops of the epilogue: `at` are the ranks that compute a value, `wanted` its readers' ranks.

    `ranks_of_total` returns, for each chain, the rank that accumulates a sum over microbatches. `rank_of_collected`
    returns the rank that has the value of a microbatch. `used` are the step's inputs that the stages of each rank read.
    If each rank finishes independently (`apart`), scalar results are not sent to all ranks.
    """

    def __init__(
        self,
        graph: EpilogueGraph,
        ranks_of_total: Callable[[fx.Node], Sequence[int]],
        rank_of_collected: Callable[[fx.Node, int], int],
        used: Sequence[Collection[fx.Node]],
        apart: bool,
    ) -> None:
        self.traced, self.given, self.links, self.apart = graph.traced, graph.given, graph.links, apart
        self.written = frozenset(graph.written.values())
        self.ranks = frozenset(range(len(used)))
        self.ranks_of_total, self.rank_of_collected = ranks_of_total, rank_of_collected
        self.users = defaultdict[fx.Node, set[int]](set)  # the ranks that read an input of the step in their stages
        for rank, inputs in enumerate(used):
            for node in inputs:
                self.users[node].add(rank)
        # The placement is repeated until each result that replaces an input is on all ranks that read it next step.
        self.needed: dict[int, RankSet] = {}
        while True:
            self._place()
            needed = {index: self.at[node] | self._users_of(node) for index, node in self.links.items()}
            if all(ranks <= self.needed.get(index, frozenset()) for index, ranks in needed.items()):
                return
            self.needed = {index: ranks | self.needed.get(index, frozenset()) for index, ranks in needed.items()}

    def _place(self) -> None:
        self.met: set[fx.Node] = set()
        self.available: dict[fx.Node, RankSet | None] = {node: self._first_ranks(node) for node in self.traced.inputs}
        for node in self.traced.nodes:
            self.available[node] = self._meeting(node)
        wanted: dict[fx.Node, set[int]] = {node: set() for node in self.traced.graph.nodes}
        for index, output in enumerate(self.traced.outputs):
            wanted[output] |= self._wanted_of_output(index, output)
        self.at: dict[fx.Node, RankSet] = {}
        memories = memories_of(self.traced)
        for node in reversed(list(self.traced.graph.nodes)):
            if node.op == "output":
                continue
            possible = self.available.get(node) or self.ranks
            is_here = node.op == "call_function" and memories[node] != "device"  # what it moved from the device is sent
            here = wanted[node] & (self.ranks if is_here else possible)
            if wanted[node] - here:
                here |= {min(possible)}
            self.at[node] = frozenset(here)
            for operand in operands_of(node):
                wanted[operand] |= here
        self.wanted = {node: frozenset(ranks) for node, ranks in wanted.items()}

    def _first_ranks(self, node: fx.Node) -> RankSet | None:
        kind, value, which = self.given[node]
        if kind == "total":
            return frozenset({self.ranks_of_total(value)[which]})
        if kind == "collected":
            return frozenset({self.rank_of_collected(value, which)})
        if kind == "input" and (info(value).is_parameter or value in self.written):
            return self._users_of(node) or None
        return None

    def _meeting(self, node: fx.Node) -> RankSet | None:
        """Return the ranks where an op can run; None for any rank. Small non-parameter values may be sent.

        Ops that depend on small values of several ranks, like a norm, run on every rank that needs the result. This
        takes one exchange; a chain from rank to rank would take many.
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
        aval = info(node).val
        return isinstance(aval, Aval) and aval.numel <= _SMALL and not self._is_of_parameter(node)

    def _is_of_parameter(self, node: fx.Node) -> bool:
        while len(operands := operands_of(node)) == 1:
            (node,) = operands
        given = self.given.get(node)
        return given is not None and given.kind == "input" and bool(info(given.node).is_parameter)

    def _wanted_of_output(self, index: int, output: fx.Node) -> RankSet:
        possible = self.available.get(output)
        if index in self.links:
            kept = self.available[self.links[index]] or possible or self.ranks
            return kept | self.needed.get(index, frozenset())
        if info(output).aval.numel == 1 and not self.apart:
            return self.ranks  # uses the existing exchange instead of a later broadcast
        return frozenset({min(possible or self.ranks)})

    def _users_of(self, node: fx.Node) -> RankSet:
        return frozenset(self.users.get(self.given[node].node, ()))


class EpilogueBuilder:
    def __init__(self, graph: EpilogueGraph, placing: EpiloguePlacement, name: str) -> None:
        self.name, self.traced, self.given, self.links = name, graph.traced, graph.given, graph.links
        self.ranks, self.at, self.wanted = placing.ranks, placing.at, placing.wanted
        self.extractor = Extractor(self.traced, graph.whole.mesh, graph.specs, lambda _: False, graph.whole.hidden)
        once = [given.node for given in self.given.values() if given.kind == "once"]
        self.kept = {storage_root(node) for node in once}  # other values may share this memory
        self.results = set(self.traced.outputs)
        self.becomes = {
            self.links[index]: node for index, node in enumerate(self.traced.outputs) if index in self.links
        }
        self._levels()

    def _levels(self) -> None:
        self.level: dict[tuple[fx.Node, int], int] = {}
        for node in self.traced.graph.nodes:
            for rank in self.at.get(node, ()):
                self.level[node, rank] = max((self._arrives(o, rank) for o in operands_of(node)), default=0)
        self._slices_late()
        self.count = max(self.level.values(), default=0) + 1

    def _slices_late(self) -> None:
        """Move views, slices and fetches of inputs to the level of their first user: an update must see its target."""
        for node in reversed(list(self.traced.nodes)):
            if not self._waits(node) or self.wanted[node] - self.at[node]:
                continue
            for rank in self.at[node]:
                users = [self.level[user, rank] for user in node.users if (user, rank) in self.level]
                if users and node not in self.results:
                    self.level[node, rank] = min(users)

    def _waits(self, node: fx.Node) -> bool:
        """Whether an op runs at the level of its first user: a view or slice, or a fetch of an input for the update."""
        value = node
        while is_move(value) or view_base(value) is not None or primitive_name(value) == "pscatter":
            value = operands_of(value)[0]
        is_input = value in self.given and self.given[value].kind == "input"
        return value is not node and (is_input or not is_move(node) or node.args[-1] == "device")

    def _arrives(self, node: fx.Node, rank: int) -> int:
        here = self.level.get((node, rank))
        return self.level[node, min(self.at[node])] + 1 if here is None else here

    def build(self) -> Epilogue:
        exchanges: list[list[Transfer]] = [[] for _ in range(self.count)]
        for node in self.traced.graph.nodes:
            if node.op == "output":
                continue
            for target in sorted(self.wanted[node] - self.at[node]):
                source = min(self.at[node])
                exchanges[self.level[node, source]].append(Transfer(node, source, target))
        self.sent = {(each.node, each.source) for level in exchanges for each in level}
        nodes = defaultdict[tuple[int, int], list[fx.Node]](list)
        for node in self.traced.nodes:
            for rank in self.at[node]:
                nodes[self.level[node, rank], rank].append(node)
        parts: list[dict[int, Subprogram]] = [{} for _ in range(self.count)]
        for level, rank in sorted(nodes):
            parts[level][rank] = self._part(nodes[level, rank], rank, level)
        outputs = tuple(self.traced.outputs)
        return Epilogue(
            self.given,
            tuple(parts),
            tuple(tuple(each) for each in exchanges),
            outputs,
            {outputs[index]: self.given[node].node for index, node in self.links.items()},
            tuple(self.at[node] | self.wanted[node] for node in outputs),
            tuple(self.extractor.spec(node) for node in outputs),
        )

    def _part(self, nodes: list[fx.Node], rank: int, level: int) -> Subprogram:
        leaving = [
            node
            for node in nodes
            if node in self.results
            or (node, rank) in self.sent
            or any(self.level.get((user, rank), level) > level for user in node.users)
        ]
        name = f"{self.name}: after the pipeline, rank {rank}, level {level}"
        part = self.extractor.write(self.extractor.select(nodes, leaving), leaving, name)
        self._donate(part, rank, level)
        return part

    def _donate(self, part: Subprogram, rank: int, level: int) -> None:
        number = {node: index for index, node in reversed(list(enumerate(part.outputs)))}
        for node, placeholder in zip(part.inputs, part.program.traced.inputs, strict=True):
            donated, new = self._may_be_overwritten(node, rank, level), self.becomes.get(node)
            update_info(placeholder, donated=donated, updated_output=None if new is None else number.get(new))

    def _may_be_overwritten(self, node: fx.Node, rank: int, level: int) -> bool:
        given = self.given.get(node)
        if given is None or given.kind != "input" or not info(given.node).donated or given.node in self.kept:
            return False
        aliases = aliases_of(node)
        return (
            self.results.isdisjoint(aliases)
            and not any(self.wanted[alias] - self.at[alias] for alias in aliases)
            and all(self.level.get((user, rank), 0) <= level for alias in aliases for user in alias.users)
        )
