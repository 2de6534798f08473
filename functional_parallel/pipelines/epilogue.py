"""After the pipeline has drained: sums of gradients become updates, each on the ranks that hold the parameter.

What follows from the sums over microbatches is one graph, whose values start out on different ranks: a parameter and
its gradient where its stage runs, a loss on the last. An op runs where all its operands are. One whose operands never
meet, such as the sum of a tied weight's two gradients or of all gradients' squares, has them exchanged first, and then
runs on every rank that wants its result, so that all of them get the same bits.
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
    """A value that one rank of the pipeline sends to another."""

    node: fx.Node
    source: int
    target: int

    @property
    def phase(self) -> str:
        """The part of the step that it belongs to; an input of the step is sent for the update."""
        return info(self.node).phase or "update"


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

    given: dict[fx.Node, EpilogueInput]
    parts: tuple[dict[int, Subprogram], ...]
    exchanges: tuple[tuple[Transfer, ...], ...]
    outputs: tuple[fx.Node, ...]
    replaces: dict[fx.Node, fx.Node]
    output_holders: tuple[RankSet, ...]
    output_specs: tuple[P, ...]


class EpilogueBuilder:
    """Builds it.

    Args:
        graph: what follows from the pipeline's sums.
        placing: of its ops.
        name: of the function.
    """

    def __init__(self, graph: EpilogueGraph, placing: EpiloguePlacement, name: str) -> None:
        self.name, self.traced, self.given, self.links = name, graph.traced, graph.given, graph.links
        self.ranks, self.at, self.wanted = placing.ranks, placing.at, placing.wanted
        self.extractor = Extractor(self.traced, graph.whole.mesh, graph.specs, lambda _: False, graph.whole.hidden)
        once = [given.node for given in self.given.values() if given.kind == "once"]
        self.kept = {storage_root(node) for node in once}  # in whose memory something else may lie
        self._levels()

    def _levels(self) -> None:
        self.level: dict[tuple[fx.Node, int], int] = {}
        for node in self.traced.graph.nodes:
            for rank in self.at.get(node, ()):
                self.level[node, rank] = max((self._arrives(o, rank) for o in operands_of(node)), default=0)
        self._slices_late()
        self.count = max(self.level.values(), default=0) + 1

    def _slices_late(self) -> None:
        """A view or a slice of an input is taken where it is used: an update sees what it may write into."""
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
        members, sent = set(nodes), {node for node in self.traced.graph.nodes if self._is_sent(node, rank)}
        leaving = [
            node
            for node in nodes
            if node in self.traced.outputs
            or node in sent
            or any(self._uses_later(u, rank, members) for u in node.users)
        ]
        part = self.extractor.part(nodes, leaving, f"{self.name}: after the pipeline, rank {rank}, level {level}")
        self._donate(part, rank, level)
        return part

    def _donate(self, part: Subprogram, rank: int, level: int) -> None:
        """Say of a part's inputs whether it may write into them, and which of its results takes their place."""
        becomes = {self.links[index]: node for index, node in enumerate(self.traced.outputs) if index in self.links}
        for node, placeholder in zip(part.inputs, part.program.traced.inputs, strict=True):
            new = becomes.get(node)
            update_info(placeholder, donated=self._may_be_overwritten(node, rank, level))
            update_info(placeholder, updated_output=part.outputs.index(new) if new in part.outputs else None)

    def _may_be_overwritten(self, node: fx.Node, rank: int, level: int) -> bool:
        """Whether an input was given up, and nothing after this level, and no other rank, asks for what lies there."""
        given = self.given.get(node)
        if given is None or given.kind != "input" or not info(given.node).donated or given.node in self.kept:
            return False
        aliases = aliases_of(node)
        users = [user for alias in aliases for user in alias.users if user.op != "output" and rank in self.at[user]]
        return (
            not any(alias in self.traced.outputs for alias in aliases)
            and not any(self.wanted[alias] - self.at[alias] for alias in aliases)
            and all(self.level[user, rank] <= level for user in users)
        )

    def _is_sent(self, node: fx.Node, rank: int) -> bool:
        return (
            node.op != "output" and min(self.at[node], default=-1) == rank and bool(self.wanted[node] - self.at[node])
        )

    def _uses_later(self, user: fx.Node, rank: int, members: set[fx.Node]) -> bool:
        return user.op != "output" and rank in self.at[user] and user not in members
