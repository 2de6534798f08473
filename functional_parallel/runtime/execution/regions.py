"""Compile the regions of pure ops in a program, between the starts and waits of collectives and writes into operands.

Collectives stay in flight as long as without regions. Long regions are cut between layers, so that equal pieces compile
once. Views that others need are computed outside, from their bases, so memory is shared as without regions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sharding_specs import Mesh

from ... import _torch
from ...ir import (
    Traced,
    crossing_values,
    cuts_between_repeats,
    first_operand,
    forget_info,
    info,
    named_arguments,
    operands_of,
    primitive_name,
    reached,
    set_info,
    source_of,
    topological_order,
    walk_args,
)
from ...ops import UNPACK, unpacked
from ...program import Program, is_started, mutated_operands, overlapped, readers_before_writes, storage_root, view_base
from .codegen import is_moved_to_device
from .inductor import CompiledRegion, region_of

aten = torch.ops.aten

_LEAST_OPS = 3  # ops that inductor can fuse; fewer gain less than a call costs
_MOST_OPS = 400  # the time to compile a region grows faster than its length
_VIEWS = frozenset({aten.reshape.default, aten.contiguous.default})  # or copies
_KERNELS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"})  # never fused


@dataclass
class RegionProgram:
    traced: Traced  # in execution order; a region is one op with several results
    # per op that writes into its operands, the ops that must have read them before
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    calls: list[CompiledRegion] = field(default_factory=list)  # in execution order; equal ones are one object


def with_regions(program: Program) -> RegionProgram:
    if "regions" not in program.cache:
        program.cache["regions"] = _RegionBuilder(program).result()
    regions: RegionProgram = program.cache["regions"]
    return regions


# --- Selection of the ops, and the cuts ---


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    return node.target in _VIEWS or view_base(node) is not None


def _is_seen_through(node: fx.Node) -> bool:
    """Whether a view shows its full operand. A view of a slice differs between layers by its offset."""
    if node.op != "call_function" or not (_is_view(node) and _is_pure(node)):
        return False
    if node.target is operator.getitem or isinstance(info(node).val, tuple):  # a result of a split, or a split
        return False
    (operand,) = operands_of(node)
    return bool(info(operand).aval.numel == info(node).aval.numel)


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_pure(node.args[0])
    if primitive_name(node) == "pcast" or node.target is UNPACK:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or mutated_operands(node):
        return False
    if (_is_view(node) and len(operands_of(node)) != 1) or is_moved_to_device(node):
        return False
    return torch.Tag.dynamic_output_shape not in target.tags and not _is_random(node)


def _is_random(node: fx.Node) -> bool:
    """Whether an op draws torch's own random numbers. Attention is tagged so, but draws none without dropout."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return named_arguments(node.target, node.args, node.kwargs).get("dropout_p") != 0.0


def _is_fusible(node: fx.Node) -> bool:
    if node.target is operator.getitem or node.target is UNPACK or _is_view(node):
        return False
    name = node.target._schema.name.removeprefix("aten::")
    return name not in _KERNELS and "attention" not in name


def _stretches(order: Sequence[fx.Node], mesh: Mesh) -> list[list[fx.Node]]:
    protected = {storage_root(value) for node in order for value in mutated_operands(node)}
    under_way: set[fx.Node] = set()
    found: list[list[fx.Node]] = []
    is_open = False
    for node in order:
        waited = under_way.intersection(operands_of(node))
        under_way -= waited
        is_inside = _is_pure(node) and node not in protected
        if is_inside and is_open and not waited:
            found[-1].append(node)
        else:
            found.append([node])
        is_open = is_inside
        if is_started(node, mesh):
            under_way.add(node)
    return found


def _cut(stretch: list[fx.Node]) -> list[list[fx.Node]]:
    crossing = crossing_values(stretch)
    cuts = [0, *cuts_between_repeats([_token(node) for node in stretch], crossing), len(stretch)]
    index = 1
    while index < len(cuts):
        first, end = cuts[index - 1], cuts[index]
        if end - first > _MOST_OPS:
            cuts.insert(index, min(range(first + _MOST_OPS // 2, first + _MOST_OPS), key=crossing.__getitem__))
        index += 1
    cuts = sorted({_after_results(stretch, cut) for cut in cuts})
    return [stretch[a:b] for a, b in itertools.pairwise(cuts)]


def _after_results(stretch: Sequence[fx.Node], cut: int) -> int:
    while cut < len(stretch) and stretch[cut].target is operator.getitem:
        cut += 1
    return cut


def _token(node: fx.Node) -> str:
    args = walk_args((node.args, node.kwargs), lambda a: info(a).val if isinstance(a, fx.Node) else a)
    return f"{node.target} {args}"


# --- The graph with regions ---


class _RegionBuilder:
    def __init__(self, program: Program) -> None:
        self.program, self.old = program, program.traced
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}  # by value
        self.done_by: dict[fx.Node, fx.Node] = {}  # by op
        self.calls: list[CompiledRegion] = []

    def result(self) -> RegionProgram:
        readers = readers_before_writes(self.old)
        order = overlapped(self.old, readers)
        for node in self.old.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        for stretch in _stretches(order, self.program.mesh):
            for part in _cut(stretch) if len(stretch) > 1 else [stretch]:
                self._write(part)
        traced = Traced(
            self.graph,
            [self.new[node] for node in self.old.inputs],
            [self.new[out] if isinstance(out, fx.Node) else out for out in self.old.outputs],
            self.old.constants,
            self.old.captured,
            [self.new[node] for node in self.old.captured_inputs],
        )
        traced.seal()
        new_readers = {
            self.done_by[node]: list(dict.fromkeys(self.done_by[each] for each in found if each in self.done_by))
            for node, found in readers.items()
        }
        return RegionProgram(traced, new_readers, self.calls)

    def _copy(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, self.new.__getitem__)
        set_info(copy, info(node))
        self.new[node] = self.done_by[node] = copy

    def _write(self, part: Sequence[fx.Node]) -> None:
        if sum(map(_is_fusible, part)) < _LEAST_OPS or not all(map(_is_pure, part)):
            for node in part:
                self._copy(node)
            return
        inside = dict.fromkeys(part)
        results, views = self._leaving(inside)
        self._call(_needed(inside, results), results)
        for node in views:
            self._copy(node)

    def _leaving(self, inside: Mapping[fx.Node, Any]) -> tuple[list[fx.Node], list[fx.Node]]:
        returned = self.old.returned()
        wanted = [n for n in inside if n in returned or any(user not in inside for user in n.users)]
        results: dict[fx.Node, None] = {}
        views: dict[fx.Node, None] = {}
        for node in wanted:
            while node in inside and _is_view(node):
                views[node] = None
                (node,) = operands_of(node)
            if node in inside and not isinstance(info(node).val, tuple):
                results[node] = None
        return [node for node in inside if node in results], [node for node in inside if node in views]

    def _call(self, ops: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
        ops = _with_views(ops)
        inside = set(ops)
        operands = list(dict.fromkeys(each for node in ops for each in operands_of(node) if each not in inside))
        region = region_of(_key(operands, ops, results), lambda: _region(operands, ops, results))
        self.calls.append(region)
        call = self.graph.call_function(region, tuple(self.new[each] for each in operands))
        source = source_of(ops[0])
        set_info(call, info(ops[0])._replace(val=tuple(info(each).aval for each in results), source=source))
        self.done_by.update(dict.fromkeys(ops, call))
        for index, node in enumerate(results):
            value = self.graph.call_function(operator.getitem, (call, index))
            set_info(value, info(node))
            self.new[node] = value


def _needed(inside: Mapping[fx.Node, Any], results: Sequence[fx.Node]) -> list[fx.Node]:
    needed = reached(results, lambda node: [each for each in operands_of(node) if each in inside])
    return [node for node in inside if node in needed]


def _with_views(ops: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the ops, preceded by the views of full operands that they read. A region then takes the views' bases."""
    found: dict[fx.Node, None] = {}
    for node in ops:
        for each in topological_order(node, lambda n: filter(_is_seen_through, operands_of(n)), found):
            found[each] = None
    return list(found)


def _key(operands: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[fx.Node]) -> str:
    number = {node: index for index, node in enumerate([*operands, *ops])}
    lines = [repr(info(node).val) for node in operands]
    for node in ops:
        args = walk_args((node.args, node.kwargs), lambda a: _Number(number[a]) if isinstance(a, fx.Node) else a)
        lines.append(f"{node.target} {args}")
    return "\n".join([*lines, f"{[number[node] for node in results]}"])


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _region(operands: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[fx.Node]) -> CompiledRegion:
    graph = fx.Graph()
    new = {node: graph.placeholder(f"x{index}") for index, node in enumerate(operands)}
    for node in ops:
        if primitive_name(node) == "pcast" or node.target is aten.detach.default:
            new[node] = new[first_operand(node)]
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].target = unpacked if node.target is UNPACK else _torch.stride_free(node.target)
            forget_info(new[node])
    graph.output(tuple(new[node] for node in results))
    return CompiledRegion(graph, f"{len(ops)} ops from {source_of(ops[0])}")
