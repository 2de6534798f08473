"""Programs after the pipeline has drained: they turn sums of gradients into updates.

Each update runs on the ranks that hold its parameter. All ops that depend on the sums over microbatches are one graph.
Its inputs are on different ranks: a parameter and its gradient on the rank of their stage, a loss on the last rank. An
op runs on the ranks that hold all its operands. If no rank holds all of them, they are exchanged first. Examples are
the sum of a tied weight's two gradients and the sum of all gradients' squares. The op then runs on every rank that
needs its result, so that all of them compute the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from sharding_specs import P

from ..ir import info, operands_of, primitive_name, update_info
from ..program import aliases_of, storage_root
from .epilogue_graph import EpilogueGraph, EpilogueInput
from .epilogue_placement import EpiloguePlacement, RankSet
from .extract import Extractor, Subprogram
from .roles import is_view

__all__ = ["Epilogue", "EpilogueBuilder", "Transfer"]


class Transfer(NamedTuple):
    """Value that one rank of the pipeline sends to another rank."""

    node: fx.Node
    source: int
    target: int

    @property
    def phase(self) -> str:
        """Phase of the step that the value belongs to: "update" for an input of the step."""
        return info(self.node).phase or "update"


@dataclass(frozen=True)
class Epilogue:
    """Programs that run after the pipeline, in levels, with exchanges between the levels.

    `output_specs` have, for each result of the step, the axes along which its computed value differs. The result's own
    spec may name more axes. For example, a gradient that is zero for any batch is laid out sharded, although all its
    shards are equal.
    """

    given: dict[fx.Node, EpilogueInput]  # origin of each input
    parts: tuple[dict[int, Subprogram], ...]  # for each level, the program of each rank
    exchanges: tuple[tuple[Transfer, ...], ...]  # for each level, the values that are sent after it
    outputs: tuple[fx.Node, ...]  # the step's results
    replaces: dict[fx.Node, fx.Node]  # result → the input of the step that it replaces, like a new parameter
    output_holders: tuple[RankSet, ...]  # for each result of the step, the ranks that hold it
    output_specs: tuple[P, ...]


class EpilogueBuilder:
    """Builds an `Epilogue` from the graph of all ops that depend on the pipeline's sums, and the ranks of these ops."""

    def __init__(self, graph: EpilogueGraph, placing: EpiloguePlacement, name: str) -> None:
        self.name, self.traced, self.given, self.links = name, graph.traced, graph.given, graph.links
        self.ranks, self.at, self.wanted = placing.ranks, placing.at, placing.wanted
        self.extractor = Extractor(self.traced, graph.whole.mesh, graph.specs, lambda _: False, graph.whole.hidden)
        once = [given.node for given in self.given.values() if given.kind == "once"]
        self.kept = {storage_root(node) for node in once}  # other values may share this memory
        self._levels()

    def _levels(self) -> None:
        self.level: dict[tuple[fx.Node, int], int] = {}
        for node in self.traced.graph.nodes:
            for rank in self.at.get(node, ()):
                self.level[node, rank] = max((self._arrives(o, rank) for o in operands_of(node)), default=0)
        self._slices_late()
        self.count = max(self.level.values(), default=0) + 1

    def _slices_late(self) -> None:
        """Move views and slices of inputs to the level of their first user: an update must see its target."""
        for node in reversed(list(self.traced.nodes)):
            if not (is_view(node) or primitive_name(node) == "pscatter") or self.wanted[node] - self.at[node]:
                continue
            for rank in self.at[node]:
                users = [self.level[user, rank] for user in node.users if (user, rank) in self.level]
                if users and node not in self.traced.outputs:
                    self.level[node, rank] = min(users)

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
        parts = tuple({r: p for r in sorted(self.ranks) if (p := self._part(r, level))} for level in range(self.count))
        outputs = tuple(self.traced.outputs)
        return Epilogue(
            self.given,
            parts,
            tuple(tuple(each) for each in exchanges),
            outputs,
            {outputs[index]: self.given[node].node for index, node in self.links.items()},
            tuple(self.at[node] | self.wanted[node] for node in outputs),
            tuple(self.extractor.spec(node) for node in outputs),
        )

    def _part(self, rank: int, level: int) -> Subprogram | None:
        nodes = [node for node in self.traced.nodes if self.level.get((node, rank)) == level]
        if not nodes:
            return None
        leaving = [
            node
            for node in nodes
            if node in self.traced.outputs
            or (node, rank) in self.sent
            or any(self.level.get((user, rank), level) > level for user in node.users)
        ]
        part = self.extractor.part(nodes, leaving, f"{self.name}: after the pipeline, rank {rank}, level {level}")
        self._donate(part, rank, level)
        return part

    def _donate(self, part: Subprogram, rank: int, level: int) -> None:
        """Record for each input of `part` whether it may be overwritten, and the result that replaces it."""
        becomes = {self.links[index]: node for index, node in enumerate(self.traced.outputs) if index in self.links}
        for node, placeholder in zip(part.inputs, part.program.traced.inputs, strict=True):
            new = becomes.get(node)
            update_info(placeholder, donated=self._may_be_overwritten(node, rank, level))
            update_info(placeholder, updated_output=part.outputs.index(new) if new in part.outputs else None)

    def _may_be_overwritten(self, node: fx.Node, rank: int, level: int) -> bool:
        """Whether an input is donated and its memory is not read after this level, nor sent to another rank."""
        given = self.given.get(node)
        if given is None or given.kind != "input" or not info(given.node).donated or given.node in self.kept:
            return False
        aliases = aliases_of(node)
        return (
            not any(alias in self.traced.outputs for alias in aliases)
            and not any(self.wanted[alias] - self.at[alias] for alias in aliases)
            and all(self.level.get((user, rank), 0) <= level for alias in aliases for user in alias.users)
        )
