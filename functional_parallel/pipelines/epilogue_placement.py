"""Placement of epilogue ops on the ranks of a pipeline: ranks that hold their operands and need their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from ..ir import Aval, info, operands_of
from .epilogue_graph import EpilogueGraph

__all__ = ["EpiloguePlacement", "RankSet"]

_SMALL = 64  # elements: the cost of sending them is only latency

RankSet = frozenset[int]


class EpiloguePlacement:
    """Assigns ranks to the ops of the epilogue: `at` are the ranks that compute a value, `wanted` those that read it.

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
        self.ranks = frozenset(range(len(used)))
        self.ranks_of_total, self.rank_of_collected, self.used = ranks_of_total, rank_of_collected, used
        self._place_until_it_holds()

    def _place_until_it_holds(self) -> None:
        """Repeat the placement until each result that replaces an input is on all ranks that read it next step."""
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
        for node in reversed(list(self.traced.graph.nodes)):
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

    def _first_ranks(self, node: fx.Node) -> RankSet | None:
        kind, value, which = self.given[node]
        if kind == "total":
            return frozenset({self.ranks_of_total(value)[which]})
        if kind == "collected":
            return frozenset({self.rank_of_collected(value, which)})
        if kind == "input" and info(value).is_parameter:
            return self._users_of(node) or None
        return None

    def _meeting(self, node: fx.Node) -> RankSet | None:
        """Return the ranks on which an op can run; None for any rank. Small non-parameter values may be sent.

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
        """Whether a value is a parameter or computed from one parameter only, like the slice that a rank updates."""
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
        return frozenset(rank for rank, inputs in enumerate(self.used) if self.given[node].node in inputs)
