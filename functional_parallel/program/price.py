"""Predict the cost of a step from its program alone, without tensors or ranks, for a mesh of any size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Aval, Traced, info, operands_of, primitive_name
from ..ops import is_move, moved_value
from ..quantities import readable_bytes
from .aliasing import readers_before_writes, view_base
from .explain import columns
from .hardware import Hardware
from .memories import memories_of
from .memory_moves import ended_before, link_of, moves_of
from .overlap import is_started, overlapped
from .price_item import Item, with_exposed
from .step_picture import draw_step
from .traffic import Collective, collective_of, phases_of
from .work import bytes_moved, flops


@dataclass(frozen=True)
class PriceRow(Item):
    count: int = 0

    def cells(self, total: float) -> tuple[str, ...]:
        share = f"{100 * self.exposed / total:.1f} %" if total else ""
        size = self.sent or self.moved
        done = f"{self.flops / 1e12:.3g} Tflop" if self.flops else readable_bytes(size) if size else ""
        named = (self.what, ", ".join(self.axes), self.phase, str(self.count), done)
        return (*named, readable_seconds(self.seconds), readable_seconds(self.exposed), share, self.source)


_HEADERS = ("what", "axis", "phase", "count", "does", "takes", "exposed", "of the step", "source")


@dataclass(frozen=True)
class Price:
    """Cost of a step on one rank; prints as a table of times.

    Attributes:
        name, mesh: name and mesh of the program.
        hardware: the hardware that the price is for.
        seconds: the time of a step.
        items: every op and collective, in the rank's order of execution.
        memory: peak of the bytes alive on a rank.
        flops: flops of the products of a rank.
        utilization: fraction of its peak that the rank's products reach over the step, recomputation included (HFU).
        notes: lines to print below.
    """

    name: str
    mesh: Mesh
    hardware: Hardware
    seconds: float
    items: tuple[Item, ...]
    memory: int
    flops: int
    utilization: float
    notes: tuple[str, ...] = ()

    @property
    def computing(self) -> float:
        """Seconds that the rank computes, on its device or its host."""
        return sum(item.seconds for item in self.items if not item.axes and item.what != "idle" and not item.is_move)

    @property
    def moving(self) -> float:
        """Seconds that values move between memories."""
        return sum(item.seconds for item in self.items if item.is_move)

    @property
    def idle(self) -> float:
        """Seconds when the rank has nothing to run: a pipeline's bubble."""
        return sum(item.seconds for item in self.items if item.what == "idle")

    @property
    def communicating(self) -> float:
        """Seconds that collectives take, hidden by computation or not."""
        return sum(item.seconds for item in self.items if item.axes)

    @property
    def exposed(self) -> float:
        """Seconds that the rank waits for collectives."""
        return sum(item.exposed for item in self.items if item.axes)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends."""
        return sum(item.sent for item in self.items)

    def bytes_sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the bytes sent by kind and axes, in the form of `Program.bytes_sent`."""
        found: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        for item in self.items:
            if item.axes:
                found[item.what, item.axes] += item.sent
        return dict(found)

    def rows(self, group: str = "kind") -> list[PriceRow]:
        """Return sums, sorted by exposed time, largest first.

        Args:
            group: "kind" for a row per kind, axes and phase; "line" to separate these by source line.

        Raises:
            ValueError: for another grouping.
        """
        if group not in ("kind", "line"):
            raise ValueError(f"price.rows(group={group!r}): it is 'kind' or 'line'")
        groups: dict[Any, list[Item]] = defaultdict(list)
        for item in self.items:
            groups[item.what, item.axes, item.phase, item.source if group == "line" else ""].append(item)
        rows = [_row(items, group == "line") for items in groups.values()]
        return sorted(rows, key=lambda row: -row.exposed)

    def table(self, group: str = "kind", most: int = 24) -> str:
        """Return the table that `print` shows; see `rows`. Rows after the first `most` are left out."""
        rows = self.rows(group)
        head, *body = columns([_HEADERS, *(row.cells(self.seconds) for row in rows[:most])], right=(3, 4, 5, 6, 7))
        if len(rows) > most:
            rest = sum(row.exposed for row in rows[most:])
            body.append(f"and {len(rows) - most} rows more, which take {readable_seconds(rest)}")
        rule = "─" * min(max(map(len, (head, *body))), 120)
        title = f"{self.name} on {self.mesh!r}, {self.mesh.size} ranks of {self.hardware.name}"
        return "\n".join([title, rule, head, rule, *body, rule, *self._footer()])

    def draw(self, path: str | Path) -> None:
        """Draw the step over time: the device, the host, and the links between memories and ranks. Needs matplotlib.

        Args:
            path: path of the image. Its suffix determines the format.

        Raises:
            ValueError: for a pipeline, which `fp.schedules.plot` draws.
        """
        if any(item.what == "idle" for item in self.items):
            raise ValueError(f"{self.name}: a pipeline is drawn by fp.schedules.plot(program.timeline(), {path!r})")
        draw_step(path, f"{self.name} on {self.mesh!r}, {self.hardware.name}", self.items, self.seconds)

    def _footer(self) -> list[str]:
        hidden = self.communicating - self.exposed
        lines = columns(
            [
                ("a step", readable_seconds(self.seconds)),
                ("computing", readable_seconds(self.computing)),
                *([("moving", readable_seconds(self.moving))] if self.moving else []),
                *([("idle", readable_seconds(self.idle))] if self.idle else []),
                ("communicating", f"{readable_seconds(self.communicating)}, {readable_seconds(hidden)} of it hidden"),
                ("sent per rank", readable_bytes(self.sent)),
                ("products per rank", f"{self.flops / 1e12:.4g} Tflop, {100 * self.utilization:.1f} % of the peak"),
                ("memory per rank", readable_bytes(self.memory)),
            ]
        )
        if self.memory > self.hardware.capacity:
            lines.append(f"note: that is more than the {readable_bytes(self.hardware.capacity)} that a rank has")
        return [*lines, str(self.hardware), *(f"note: {note}" for note in self.notes)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: totals, and rows by kind."""
        times = ("seconds", "computing", "moving", "idle", "communicating", "exposed")
        names = ("name", *times, "sent", "memory", "flops", "utilization")
        rows = [{**vars(row), "axes": list(row.axes)} for row in self.rows()]
        mesh, hardware = self.mesh.shape, self.hardware.name
        return {**{name: getattr(self, name) for name in names}, "mesh": mesh, "hardware": hardware, "rows": rows}

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def _row(items: Sequence[Item], with_source: bool) -> PriceRow:
    first = items[0]
    names = ("flops", "moved", "sent", "seconds", "exposed")
    sums: dict[str, Any] = {name: sum(getattr(item, name) for item in items) for name in names}
    source = first.source if with_source else ""
    start = min(item.start for item in items)
    return PriceRow(first.what, first.axes, first.phase, source, **sums, start=start, count=len(items))


def readable_seconds(seconds: float) -> str:
    """Format seconds with a unit.

    >>> readable_seconds(1.5), readable_seconds(0.0123), readable_seconds(4e-6)
    ('1.5 s', '12.3 ms', '4.0 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.1f} µs"


def price_of(
    name: str, traced: Traced, mesh: Mesh, hardware: Hardware, memory: int = 0, notes: Iterable[str] = ()
) -> Price:
    run = _RankClocks(traced, mesh, hardware)
    total = sum(run.flops.values())
    ideal = sum(done / hardware.rate(dtype) for dtype, done in run.flops.items())
    items = tuple(with_exposed(run.items))
    seconds = max((item.end for item in items), default=0.0)
    utilization = ideal / seconds if seconds else 0.0
    return Price(name, mesh, hardware, seconds, items, memory, total, utilization, tuple(notes))


class _RankClocks:
    """Runs the ops of a rank in order, on clocks. Its device and each link run one after another, beside its host.

    A move to or from the device, or a collective, starts when the device has run what is before it. The host waits for
    a move when an op needs it, and the device for a collective.
    """

    def __init__(self, traced: Traced, mesh: Mesh, hardware: Hardware) -> None:
        self.mesh, self.hardware = mesh, hardware
        self.free: dict[str, float] = defaultdict(float)  # when the host, the device and each link are free
        self.flops: dict[torch.dtype, int] = defaultdict(int)
        self.items: list[Item] = []
        self.ready: dict[fx.Node, float] = {}  # when an op ends
        self.phases, self.memories = phases_of(traced), memories_of(traced)
        self.paths = {
            traced.outputs[at]: info(x).path for x in traced.inputs if (at := info(x).updated_output) is not None
        }
        readers = readers_before_writes(traced)
        order = overlapped(traced, readers)
        moves = [move for move in moves_of(traced, self.memories) if move.is_started]
        ended, self.moves = ended_before(order, moves), {move.node for move in moves}
        for node in order:
            self._wait([*operands_of(node), *readers.get(node, ()), *ended.get(node, ())])
            collective = collective_of(node, mesh)
            if collective is not None and collective.bytes:
                self._communicate(node, collective)
            elif collective is None and primitive_name(node) is None and view_base(node) is None:
                self._compute(node)

    def _wait(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            waiting = "host" if is_move(node) else "device"
            self.free[waiting] = max(self.free[waiting], self.ready.get(node, 0.0))

    def _start(self, node: fx.Node, lane: str, seconds: float) -> float:
        after = ["host", lane, *["device"] * (lane == "between ranks" or "device" in lane)]
        start = max(self.free[each] for each in after)
        self.free[lane] = self.ready[node] = start + seconds
        return start

    def _communicate(self, node: fx.Node, one: Collective) -> None:
        seconds = seconds_of(node, self.mesh, self.hardware, self.memories)
        known = one.kind, one.axes, self.phases[node], str(one.source or "")
        start = self._start(node, "between ranks", seconds)
        self.items.append(Item(*known, 0, 0, one.bytes, seconds, start=start, parameters=one.parameters))
        if not is_started(node, self.mesh):
            self._wait([node])

    def _compute(self, node: fx.Node) -> None:
        seconds = seconds_of(node, self.mesh, self.hardware, self.memories)
        done, nbytes = flops(node), bytes_moved(node)
        what, lane, paths = "products" if done else "other ops", "device", tuple[str, ...]()
        if is_move(node):
            nbytes, lane = info(node).nbytes, " → ".join(link_of(node, self.memories))
            what, paths = lane, info(node).parameters or (info(moved_value(node)).path or self.paths.get(node, ""),)
        elif self.memories[node] == "host":
            done, what, lane = 0, "host ops", "host"
        self.flops[_dtype(node)] += done
        known = what, (), self.phases[node], str(info(node).source or "")
        start = self._start(node, lane, seconds)
        self.items.append(Item(*known, done, nbytes, 0, seconds, start=start, parameters=paths))
        if is_move(node) and node not in self.moves:
            self._wait([node])


def seconds_of(node: fx.Node, mesh: Mesh, hardware: Hardware, memories: Mapping[fx.Node, str]) -> float:
    """Return the duration of an op or a collective if nothing else runs."""
    collective = collective_of(node, mesh)
    if collective is not None and collective.bytes:
        return hardware.collective(collective, mesh)
    if collective is not None or primitive_name(node) is not None or view_base(node) is not None:
        return 0.0
    if is_move(node):
        link = hardware.disk if "disk" in link_of(node, memories) else hardware.host
        return link.seconds(info(node).nbytes / hardware.links_share)
    if memories[node] == "host":
        return hardware.on_host(bytes_moved(node))
    return hardware.compute(flops(node), bytes_moved(node), _dtype(node))


def _dtype(node: fx.Node) -> torch.dtype:
    values = [info(value).val for value in (*operands_of(node), node)]
    found = (value.dtype for value in values if isinstance(value, Aval) and value.dtype.is_floating_point)
    return next(found, torch.float32)
