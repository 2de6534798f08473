"""Copies of one body in a graph: consecutive slices with the same ops, such as the layers of a model.

Two copies have one form if one is the other with other values from outside, or with other slices of them, such as the
layers of stacked weights. Nothing is known about these values: they may be inputs, results of the previous copy, or
results of any other op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import fx

from .. import _torch
from .graph import Traced, tensor_operands, walk_args
from .info import info
from .repeats import crossing_values, runs_of_repeats
from .simplify import frozen
from .stamping import slices_of

_LEAST_OPS = 4  # of a copy
_DETACHES = torch.ops.aten.detach.default


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of a body: consecutive ops of a graph."""

    nodes: tuple[fx.Node, ...]
    externals: tuple[fx.Node, ...]  # values from outside, in the order of their first use
    escapes: tuple[int, ...]  # positions of the nodes that are read outside
    later: tuple[bool, ...]  # for each external value, whether ops after the copy read it
    form: int  # equal for copies that differ only in the values from outside, the slices of them, and later uses


def copies_of(traced: Traced) -> list[Copy]:
    """Return the copies of all bodies of a sealed graph, in order. No two share an op, and each form occurs twice."""
    if not repeats_are_shared():
        return []
    nodes = list(traced.nodes)
    numbers: dict[Hashable, int] = {}
    tokens = [numbers.setdefault(_token(node), len(numbers)) for node in nodes]
    runs = runs_of_repeats(tokens, crossing_values(nodes, traced.returned()), _LEAST_OPS, 2 * _LEAST_OPS - 1)
    find = _CopyFinder(traced, nodes, tokens)
    found = [find.copy(start, start + run.period) for run in runs for start in range(run.start, run.end, run.period)]
    count = Counter(copy.form for copy in found)
    return [copy for copy in found if count[copy.form] > 1]


class _CopyFinder:
    def __init__(self, traced: Traced, nodes: Sequence[fx.Node], tokens: Sequence[int]) -> None:
        self.nodes, self.tokens = nodes, tokens
        self.position = {node: index for index, node in enumerate(nodes)}
        self.attached = _attached(traced)
        self.forms: dict[Hashable, int] = {}

    def copy(self, start: int, end: int) -> Copy:
        nodes, externals = self.nodes[start:end], dict[fx.Node, int]()
        described: list[Hashable] = []
        escapes = tuple(at for at, node in enumerate(nodes) if self._last_use(node) >= end)
        for index, node in enumerate(nodes, start):
            operands: list[int] = []
            for operand in tensor_operands(node):
                at = self.position.get(operand, -1)
                operands.append(at - start if at >= start else -1 - externals.setdefault(operand, len(externals)))
            is_read_once = len(node.users) == 1 and index - start not in escapes
            bounds = slices_of([node]) if operands[:1] and operands[0] >= 0 else []
            described.append((self.tokens[index], *operands, *bounds, is_read_once))
        later = tuple(self._last_use(node) >= end for node in externals)
        outside = tuple((node in self.attached, len(node.users) == 1) for node in externals)
        form = (*described, escapes, outside)
        return Copy(tuple(nodes), tuple(externals), escapes, later, self.forms.setdefault(form, len(self.forms)))

    def _last_use(self, node: fx.Node) -> int:
        return max(self.position.get(user, len(self.nodes)) for user in node.users)


def _token(node: fx.Node) -> Hashable:
    """Return the identity of an op, without its operands and its source line."""
    known = info(node)
    given = node.args[:2] + node.args[4:] if slices_of([node]) else node.args
    args = walk_args((given, node.kwargs), lambda value: "(node)" if isinstance(value, fx.Node) else value)
    facts = (known.val, known.type, known.no_grad, known.backward, known.implicit_cast, known.enumerated)
    key: tuple[Hashable, ...] = (node.target, frozen(args), *facts)
    try:
        hash(key)
    except TypeError:
        return id(node)
    return key


def _attached(traced: Traced) -> set[fx.Node]:
    """Return the nodes that depend on an input otherwise than through `detach`."""
    found = {node for node in traced.graph.nodes if node.op == "placeholder"}
    for node in traced.nodes:
        if node.target is not _DETACHES and any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


# --- Switch ---


def without_repeats() -> AbstractContextManager[None]:
    """Trace and partition every copy of a body op by op, in this context: the reference for the shared ones."""
    return _torch.pushed(_switched_off(), True)


def repeats_are_shared() -> bool:
    return not _switched_off()


def _switched_off() -> list[bool]:
    return _torch.of_thread("without repeats", list[bool])
