"""Collectives of a program, with the bytes that a rank sends for each in a ring."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from sharding_specs import Mesh

from ..collectives import COMMUNICATING, CollectiveCall
from ..ir import Aval, Source, Traced, collective_call, info, update_info


@dataclass(frozen=True)
class Collective:
    """One collective of a program; `bytes` is the number of bytes that a rank sends for it."""

    kind: str
    axes: tuple[str, ...]
    operand: Aval
    result: Aval
    bytes: int
    source: Source | None
    phase: str  # "forward", "backward" or "update"
    node: fx.Node
    parameters: tuple[str, ...] = ()  # paths, if it transfers parameters or their gradients

    @property
    def backward(self) -> bool:
        return self.phase == "backward"


def collectives_of(traced: Traced, mesh: Mesh, *, casts: bool = False) -> Iterator[Collective]:
    for node, phase in phases_of(traced).items():
        found = collective_of(node, mesh, phase)
        if found is not None and (casts or found.kind in COMMUNICATING):
            yield found


def phases_of(traced: Traced) -> dict[fx.Node, str]:
    """Map each op to the phase of the step that it belongs to. After the last op of the backward comes the update."""
    nodes = list(traced.nodes)
    last = max((index for index, node in enumerate(nodes) if info(node).backward), default=len(nodes))
    return {
        node: "backward" if info(node).backward else info(node).phase or ("update" if index > last else "forward")
        for index, node in enumerate(nodes)
    }


def keep_phases(traced: Traced) -> None:
    for node, phase in phases_of(traced).items():
        update_info(node, phase=phase)


def collective_of(node: fx.Node, mesh: Mesh, phase: str = "forward") -> Collective | None:
    call = collective_call(node)
    axes = tuple(axis for axis in call.axes if mesh.axis_size(axis) > 1) if call else ()
    if call is None or not axes:
        return None
    known = info(node)
    operand, result = info(node if call.operand is None else call.operand).aval, known.aval
    sent = _bytes(call, operand, result, mesh.axis_size(axes)) if call.kind in COMMUNICATING else 0
    source = known.used_at or known.source
    return Collective(call.kind, axes, operand, result, sent, source, phase, node, known.parameters)


def _bytes(call: CollectiveCall, operand: Aval, result: Aval, size: int) -> int:
    if call.kind == "all_gather":
        return result.nbytes * (size - 1) // size
    if call.kind in ("psum_scatter", "all_to_all", "scatter"):
        return operand.nbytes * (size - 1) // size
    if call.pairs is not None:
        return operand.nbytes if any(map(operator.ne, call.pairs[::2], call.pairs[1::2])) else 0
    if call.kind in ("pbroadcast", "broadcast", "gather", "reduce"):
        return operand.nbytes
    return 2 * operand.nbytes * (size - 1) // size


def counts_of(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    return dict(Counter((one.kind, one.axes) for one in found))


def bytes_of(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in found:
        sums[one.kind, one.axes] += one.bytes
    return dict(sums)
