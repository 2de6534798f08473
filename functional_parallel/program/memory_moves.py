"""Moves of a program between memories, with their bytes, and when a rank that moves beside its ops waits for them.

A link is a pair of memories, in one direction. Its moves run one after another. A move is waited for when its result is
needed, or when its link would have too many bytes in flight: the values that it copies stay alive until then. The new
values of a donated state may be in flight when a step ends: they are waited for where the next step reads them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..ir import Aval, Source, Traced, first_operand, info, operands_of, primitive_name
from ..ops import is_move, kind_of_memory, moved_value
from .aliasing import mutated_operands, readers_before_writes, shares_memory
from .memories import memories_of
from .traffic import phases_of

aten = torch.ops.aten

IN_FLIGHT = 64 << 20  # bytes of the moves of a link that run at the same time, or one move
LEAST = 16 << 10  # bytes of a move that is worth a worker


@dataclass(frozen=True)
class MemoryMove:
    """One move of a program between two memories."""

    source: str  # the memory of the operand
    target: str
    operand: Aval
    line: Source | None
    phase: str  # "forward", "backward" or "update"
    node: fx.Node
    parameters: tuple[str, ...] = ()  # paths, if it moves parameters or their gradients

    @property
    def bytes(self) -> int:
        return self.operand.nbytes

    @property
    def kind(self) -> str:
        return f"{self.source} → {self.target}"

    @property
    def is_started(self) -> bool:
        """Whether it runs beside other ops, by the worker of its link."""
        return self.bytes >= LEAST


def moves_of(traced: Traced, memories: Mapping[fx.Node, str] | None = None) -> Iterator[MemoryMove]:
    found = [node for node in traced.nodes if is_move(node)]
    phases = phases_of(traced) if found else {}
    memories = memories_of(traced) if found and memories is None else memories or {}
    for node in found:
        known, line = info(node), info(node).used_at or info(node).source
        yield MemoryMove(*link_of(node, memories), known.aval, line, phases[node], node, known.parameters)


def link_of(move: fx.Node, memories: Mapping[fx.Node, str]) -> tuple[str, str]:
    return kind_of_memory(memories[moved_value(move)]), kind_of_memory(memories[move])


def bytes_of_moves(found: Iterable[MemoryMove]) -> dict[tuple[str, str], int]:
    sums: Counter[tuple[str, str]] = Counter()
    for one in found:
        sums[one.source, one.target] += one.bytes
    return dict(sums)


def ended_before(order: Sequence[fx.Node], moves: Collection[MemoryMove]) -> dict[fx.Node, list[fx.Node]]:
    """Map each move to earlier ones of its link that it waits for, to keep the bytes in flight."""
    known, found = {move.node: move for move in moves}, dict[fx.Node, list[fx.Node]]()
    flying, filled = defaultdict[str, deque[MemoryMove]](deque), Counter[str]()
    for move in (known[node] for node in order if node in known):
        queue = flying[move.kind]
        while queue and filled[move.kind] + move.bytes > IN_FLIGHT:
            filled[move.kind] -= queue[0].bytes
            found.setdefault(move.node, []).append(queue.popleft().node)
        queue.append(move)
        filled[move.kind] += move.bytes
    return found


def waits_of(traced: Traced, order: Sequence[fx.Node], moves: Collection[MemoryMove]) -> dict[fx.Node, int]:
    """Map each move to the position of the op before which a rank waits for it; after the last op for results.

    An input that the last step may still move is waited for in the same way.
    """
    readers, ended = readers_before_writes(traced), ended_before(order, moves)
    nodes = [move.node for move in moves]
    found = dict.fromkeys([*nodes, *may_outlast(traced, nodes).values()], len(order))
    for at in reversed(range(len(order))):
        node = order[at]
        for each in (*operands_of(node), *readers.get(node, ()), *ended.get(node, ())):
            if each in found:
                found[each] = at
    return found


def may_outlast(traced: Traced, moves: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map the moves that may be in flight when a step ends to the donated inputs that their results replace.

    What they copy is in memory that the next step does not write: neither the state's, nor an input's.
    """
    results = Counter(out for out in traced.outputs if isinstance(out, fx.Node)) if moves else Counter[fx.Node]()
    returned, found = set(map(_memory_of, results)), dict[fx.Node, fx.Node]()
    for old in traced.inputs:
        index = info(old).updated_output
        new = None if index is None else traced.outputs[index]
        if info(old).donated and isinstance(new, fx.Node) and new in moves and results[new] == 1:
            root = _memory_of(moved_value(new))
            if root.op == "call_function" and root not in returned:
                found[new] = old
    return found


def _memory_of(value: fx.Node) -> fx.Node:
    """Return the value that this value may share memory with."""
    while value.op == "call_function":
        made, index = value.args[:2] if value.target is operator.getitem else (value, 0)
        if written := mutated_operands(made):
            value = written[index]
        elif (primitive_name(value) is None and not shares_memory(value)) or _is_other_type(value):
            break
        else:
            value = first_operand(value)
    return value


def _is_other_type(value: fx.Node) -> bool:
    return value.target is aten._to_copy.default and info(value).aval.dtype != info(first_operand(value)).aval.dtype
