"""Find the op that computed a non-finite value: run op by op, and follow non-finite operands back from the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from ...functions import PyTree
from ...ir import Traced, operands_of, reached, source_of, walk_args

Handle = TypeVar("Handle")


@dataclass(frozen=True)
class Origin:
    op: str
    source: str  # the line of the user's code, with its text; "" if none is known
    values: str  # the numbers of NaN and infinite values in its result
    rank: int | None  # a rank that has them; None in a simulated pipeline
    order: tuple[int, int]  # in a pipeline, the number of programs that ran before, and the op's position in its own

    def __str__(self) -> str:
        on = "" if self.rank is None else f" on rank {self.rank}"
        where = self.source or "an unknown line"
        return f"{self.op} at {where}: its result has {self.values}{on}, its operands are finite"


@dataclass
class Log:
    first: Origin | None = None
    programs: int = 0  # that ran


class Recorded:
    """Record of a run of a program: which of its values were not finite. `ranks` has the ranks of a node's tensors."""

    def __init__(self, traced: Traced, ranks: Callable[[fx.Node], Sequence[int]]) -> None:
        self.traced, self._ranks = traced, ranks
        self._found: dict[fx.Node, _Counts | None] = {}  # None if all values are finite

    def run(self, function: Callable[[list[Handle]], list[Handle]], handles: list[Handle], log: Log) -> list[Handle]:
        for node, handle in zip(self.traced.inputs, handles, strict=True):
            self.note(node, handle)
        for node in self.traced.graph.nodes:
            if node.op == "get_attr":
                self.note(node, self.traced.constants[str(node.target)])
        with torch.no_grad():
            results = function(handles)
        node = self._origin()
        if node is not None and log.first is None:
            found, source = self._found[node], source_of(node)
            assert found is not None
            order = (log.programs, list(self.traced.graph.nodes).index(node))
            told = "" if source is None else f"{source}: `{source.text}`"
            log.first = Origin(str(node.target), told, str(found), found.rank, order)
        log.programs += 1
        return results

    def note(self, node: fx.Node, value: Handle) -> Handle:
        each = value if isinstance(value, list) else [value]
        ranks = self._ranks(node)
        found = (_non_finite(x, ranks[index] if index < len(ranks) else ranks[0]) for index, x in enumerate(each))
        self._found[node] = next(filter(None, found), None)
        return value

    def _origin(self) -> fx.Node | None:
        bad = self._bad()
        before = reached(
            [out for out in self.traced.outputs if out in bad],
            lambda node: [operand for operand in operands_of(node) if operand in bad],
        )
        sources = {node for node in before if node.op == "call_function" and bad.isdisjoint(operands_of(node))}
        return next((node for node in self.traced.graph.nodes if node in sources), None)

    def _bad(self) -> set[fx.Node]:
        """Return the nodes with non-finite values, except values that are infinite on purpose."""
        bad: set[fx.Node] = set()
        meant: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if node.op == "output":
                continue
            found, operands = self._found.get(node), operands_of(node)
            if node not in self._found:  # a cast or a transpose without a line; it has its operand's values
                bad |= {node} & {node for operand in operands if operand in bad}
                meant |= {node} & {node for operand in operands if operand in meant}
            elif found is not None:
                on_purpose = node.op == "get_attr" or _has_infinite_number(node) or bool(meant & set(operands))
                (meant if on_purpose and not found.nan else bad).add(node)
        return bad


@dataclass(frozen=True)
class _Counts:
    nan: int
    infinite: int
    of: int
    rank: int

    def __str__(self) -> str:
        told = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        return f"{' and '.join(told)} of {self.of} values"


def _has_infinite_number(node: fx.Node) -> bool:
    found: list[bool] = []
    walk_args((node.args, node.kwargs), lambda x: found.append(isinstance(x, float) and math.isinf(x)))
    return any(found)


def _non_finite(value: PyTree, rank: int) -> _Counts | None:
    if isinstance(value, (tuple, list)):
        return next(filter(None, (_non_finite(part, rank) for part in value)), None)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return None  # a value on the meta device is another rank's
    finite = int(torch.isfinite(value).sum())
    if finite == value.numel():
        return None
    nan = int(torch.isnan(value).sum())
    return _Counts(nan, value.numel() - finite - nan, value.numel(), rank)
