"""Order in which one rank runs a program's ops, so that collectives overlap with computation.

A collective starts as soon as its operands are computed; ops that do not need its result follow (as Megatron-LM
overlaps a linear layer's backward, arXiv 2205.05198). Ops that only read a value are delayed, because reading means
waiting. Gathers of parameters keep their positions, because an early gather takes memory.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from sharding_specs import Mesh

from ..collectives import STARTED
from ..ir import Traced, collective_call, info, operands_of, primitive_name, topological_order
from ..ops import PACK, UNPACK
from .aliasing import mutated_operands, shares_memory


def is_started(node: fx.Node, mesh: Mesh) -> bool:
    call = collective_call(node, *STARTED)
    return call is not None and mesh.axis_size(call.axes) > 1


def overlapped(traced: Traced, readers: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    order: dict[fx.Node, None] = {}
    waiting: list[fx.Node] = []
    stored = {node for node in traced.inputs if info(node).is_parameter}  # and values computed from parameters only
    for node in traced.nodes:
        if stored.issuperset(operands_of(node)):
            stored.add(node)
        if primitive_name(node) in STARTED:
            _write([*waiting, node] if node in stored else [node, *waiting], order, readers)
            waiting.clear()
        elif not _only_looks(node):
            waiting.append(node)
    _write([*waiting, *_computed(out for out in traced.outputs if isinstance(out, fx.Node))], order, readers)
    return _with_results(order)


def one_scatter_at_a_time(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each reduce-scatter, or the op that packs for it, to the one to complete before it, to free its gradient."""
    scatters = [index for index, node in enumerate(order) if primitive_name(node) == "psum_scatter"]
    found = {}
    for last, index in itertools.pairwise(scatters):
        is_packed_for = order[index - 1].target is PACK and order[index - 1] in operands_of(order[index])
        found[order[index - is_packed_for]] = [order[last]]
    return found


def _write(nodes: Iterable[fx.Node], order: dict[fx.Node, None], readers: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    for node in nodes:
        for each in topological_order(node, lambda n: [*_computed(operands_of(n)), *readers.get(n, ())], order):
            order[each] = None


def _with_results(order: Mapping[fx.Node, None]) -> list[fx.Node]:
    """Move each `getitem` after its op: a result that is read later would keep all results of the op alive."""
    found: dict[fx.Node, None] = {}
    for node in order:
        waiting = [] if node in found else [node]
        while waiting:
            each = waiting.pop()
            found[each] = None
            waiting += [user for user in each.users if user.target is operator.getitem and user in order]
    return list(found)


def _computed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function"]


def _only_looks(node: fx.Node) -> bool:
    if primitive_name(node) == "pcast" or node.target in (operator.getitem, UNPACK):
        return True
    return shares_memory(node) and not mutated_operands(node)
