"""Predict the bytes of live tensors at each op of a program, before it runs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..ir import Role, Traced, info, operands_of, primitive_name, reached, residuals
from ..ops import PACK, UNPACK, UNPACK_INTO, is_move, kind_of_memory, moved_value
from ..quantities import readable_bytes
from . import extra_memory
from .aliasing import mutated_operands, view_base
from .memories import memories_of
from .memory_moves import may_outlast, moves_of, waits_of

aten = torch.ops.aten


MEMORY_KINDS = (
    *("parameters", "optimizer state", "other inputs", "gathered", "residuals", "gradients"),
    *("buckets", "transfers", "temporaries"),  # buffers of collectives, buffers of moves, and the rest
)

_UNPACKS = (UNPACK, UNPACK_INTO)

Storage = tuple[fx.Node, int]  # the op that allocates it, and the index of the result


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of live tensors on one rank over a program, in the memory of its device; print it for a table."""

    name: str
    curve: tuple[int, ...]  # bytes alive while each op runs: operands, results, and all that later ops need
    ops: tuple[str, ...]  # name and source line of each op
    alive: dict[str, int]  # at the peak, the bytes of each kind
    largest: tuple[tuple[int, str, str], ...]  # at the peak, the largest values: bytes, description, source line
    shared: int = 0  # bytes that the transport of collectives uses in addition, at most, as `extra_memory` predicts
    copied: int = 0  # bytes of `curve` for copies of inputs and results, which a CUDA graph holds between steps
    beside: Mapping[str, MemoryUse] = field(default_factory=dict)  # of the other memories that it uses, by name
    in_flight: tuple[int, ...] = ()  # `curve` if every move ends when a rank waits for it; empty if none is that large

    @property
    def peak(self) -> int:
        return max(self.curve, default=0)

    @property
    def peak_in_flight(self) -> int:
        """Peak while moves run beside the ops: the values that a move copies live until a rank waits for it."""
        return max(self.in_flight, default=self.peak)

    @property
    def peaks_in_flight(self) -> dict[str, int]:
        return {"device": self.peak_in_flight, **{name: each.peak_in_flight for name, each in self.beside.items()}}

    @property
    def peaks(self) -> dict[str, int]:
        """Peak of each memory that the program uses."""
        return {"device": self.peak, **{name: each.peak for name, each in self.beside.items()}}

    @property
    def at(self) -> int:
        return self.curve.index(self.peak) if self.curve else 0

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "peak", "peak_in_flight", "at", "shared", "copied")
        found = {name: getattr(self, name) for name in names} | {"alive": dict(self.alive), "curve": list(self.curve)}
        return found | {name: each.to_dict() for name, each in self.beside.items()}

    def __str__(self) -> str:
        lines = [f"{self.name}: at most {readable_bytes(self.peak)} of tensors on a rank, at {self.ops[self.at]}"]
        lines += [f"  {kind:15}  {readable_bytes(size):>10}" for kind, size in self.alive.items() if size]
        in_flight = f"with moves in flight, at most {readable_bytes(self.peak_in_flight)}"
        lines += [in_flight] if self.peak_in_flight > self.peak else []
        lines += [said] if (said := extra_memory.current().note(self.shared)) else []
        lines += [f"of these, {readable_bytes(self.copied)} of copies for a CUDA graph"] if self.copied else []
        lines += ["the largest of them"]
        lines += [f"  {readable_bytes(size):>10}  {what:24}  {where}" for size, what, where in self.largest]
        return "\n".join([*lines, *map(str, self.beside.values())])

    def plot(self, path: str | Path) -> None:
        curves = {name: each.curve for name, each in self.beside.items()}
        draw(path, self.name, {"device" if curves else "": self.curve, **curves}, self.peak, "op")


def draw(path: str | Path, title: str, curves: Mapping[str, Sequence[int]], peak: int, unit: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    for name, curve in curves.items():
        sizes = [size / 2**20 for size in curve]
        axes.fill_between(range(len(curve)), sizes, step="mid", alpha=0.6 / len(curves), label=name or None)
    axes.axhline(peak / 2**20, color="tab:red", linewidth=0.8, label=f"peak {readable_bytes(peak)}")
    axes.set(xlabel=unit, ylabel="MiB of live tensors on a rank", title=title, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def with_copies(memory: MemoryUse, traced: Traced) -> MemoryUse:
    replaced = [info(node).updated_output for node in traced.inputs if info(node).donated]
    copied = sum(info(node).nbytes for node in traced.inputs if not info(node).donated)
    copied += sum(
        info(node).nbytes
        for index, node in enumerate(traced.outputs)
        if isinstance(node, fx.Node) and index not in replaced
    )
    alive = {**memory.alive, "other inputs": memory.alive["other inputs"] + copied}
    curve = tuple(size + copied for size in memory.curve)
    return replace(memory, curve=curve, alive=alive, copied=copied, in_flight=())  # its moves end at once


def memory_of(name: str, traced: Traced, absent: Collection[fx.Node] = (), returned: Sequence[str] = ()) -> MemoryUse:
    return StorageTable(name, traced, absent, returned).memory()


class StorageTable:
    def __init__(
        self, name: str, traced: Traced, absent: Collection[fx.Node] = (), returned: Sequence[str] = ()
    ) -> None:
        self.name, self.traced, self.absent, self.returned = name, traced, absent, returned
        self.nodes = list(traced.nodes)
        self.sizes: dict[Storage, int] = {}
        self.storages: dict[fx.Node, list[Storage]] = {}  # one, or one per result of an op with several results
        for node in traced.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._own(node)
            elif node.op == "call_function":
                self._place(node)

    @functools.cached_property
    def memories(self) -> dict[fx.Node, str]:
        return {node: kind_of_memory(each) for node, each in memories_of(self.traced, self.returned).items()}

    def memory(self) -> MemoryUse:
        names = sorted(set(self.memories.values()) - {"device"})
        beside = {name: self._use(name, f"{self.name}, memory {name!r}") for name in names}
        return replace(self._use("device", self.name), beside=beside)

    def _use(self, memory: str, name: str) -> MemoryUse:
        curve = self.curve(memory)
        at = curve.index(max(curve)) if curve else 0
        always, kinds = (0, len(self.nodes)), Counter[str]()
        own = (storage for storage in self.sizes if self.memories[storage[0]] == memory)
        spans = ((storage, self.spans.get(storage, always)) for storage in own)
        living = [storage for storage, (born, dies) in spans if born <= at <= dies]
        for storage in living:
            kinds[self.kind(storage)] += self.sizes[storage]
        largest = sorted(living, key=lambda storage: -self.sizes[storage])[:8]
        return MemoryUse(
            name,
            curve,
            tuple(map(self.op, range(len(self.nodes)))),
            {kind: kinds[kind] for kind in MEMORY_KINDS},
            tuple((self.sizes[s], f"{self.kind(s)}: {self.title(s)}", self.line(s)) for s in largest),
            in_flight=self.curve(memory, in_flight=True) if self.waits else (),
        )

    def curve(self, memory: str = "device", in_flight: bool = False) -> tuple[int, ...]:
        own = {storage: size for storage, size in self.sizes.items() if self.memories[storage[0]] == memory}
        held = sum(size for storage, size in own.items() if storage not in self.spans)
        lifetimes = self.spans_in_flight if in_flight else self.spans
        spans = {storage: span for storage, span in lifetimes.items() if storage in own}
        before = {storage: (0, at - 1) for storage, at in self.arriving.items() if in_flight and at and storage in own}
        return tuple(held + alive + more for alive, more in zip(self.alive(spans), self.alive(before), strict=True))

    def alive(self, spans: Mapping[Storage, tuple[int, int]]) -> list[int]:
        changes = [0] * (len(self.nodes) + 1)
        for storage, (born, dies) in spans.items():
            changes[born] += self.sizes[storage]
            changes[dies + 1] -= self.sizes[storage]
        return list(itertools.accumulate(changes[:-1]))

    @functools.cached_property
    def spans(self) -> dict[Storage, tuple[int, int]]:
        """Number of the op that allocates each storage, and number of the last op that needs it."""
        return self._lifetimes(self.last_uses)

    @functools.cached_property
    def spans_in_flight(self) -> dict[Storage, tuple[int, int]]:
        """`spans` by `last_uses_in_flight`."""
        return self._lifetimes(self.last_uses_in_flight)

    def _lifetimes(self, last_uses: Mapping[Storage, int]) -> dict[Storage, tuple[int, int]]:
        born = {storage: index for index, node in enumerate(self.nodes) for storage in self.made_by(node)}
        return {storage: (index, last_uses.get(storage, index)) for storage, index in born.items()}

    def _own(self, node: fx.Node) -> None:
        values = info(node).results
        self.storages[node] = [(node, index) for index in range(len(values))]
        for storage, value in zip(self.storages[node], values, strict=True):
            is_held = value is not None and node not in self.absent  # None is a gradient that was not requested
            self.sizes[storage] = value.nbytes if value is not None and is_held else 0

    def _place(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source = self.storages[node.args[0]]
            self.storages[node] = [source[node.args[1]] if len(source) > 1 else source[0]]
            return
        written = mutated_operands(node)
        if written:
            self.storages[node] = [self.storages[value][0] for value in written]
            return
        base = view_base(node)
        if base is None:
            self._own(node)
        else:
            self.storages[node] = self.storages[base][:1]

    def made_by(self, node: fx.Node) -> list[Storage]:
        return [storage for storage in self.storages[node] if storage[0] is node]

    @functools.cached_property
    def last_uses(self) -> dict[Storage, int]:
        """Number of the last op that reads each storage or a view of it; results live to the end."""
        found: dict[Storage, int] = {}
        read: dict[fx.Node, int] = {}  # an op may have all new parameters as results
        for index, node in enumerate(self.nodes):
            read[node] = index
            read.update(dict.fromkeys(operands_of(node), index))
        for value, index in read.items():
            for storage in self.storages[value]:
                found[storage] = max(index, found.get(storage, 0))
        for output in self.traced.outputs:
            if isinstance(output, fx.Node):
                found.update(dict.fromkeys(self.storages[output], len(self.nodes) - 1))
        return found

    @functools.cached_property
    def waits(self) -> dict[fx.Node, int]:
        """Position of the op before which a rank waits for each move that runs beside its ops."""
        moves = [move for move in moves_of(self.traced, self.memories) if move.is_started]
        return waits_of(self.traced, self.nodes, moves) if moves else {}

    @functools.cached_property
    def last_uses_in_flight(self) -> dict[Storage, int]:
        """`last_uses`, if the worker of a link reads the operand of a move until a rank waits for the move."""
        found = dict(self.last_uses)
        for move, at in self.waits.items():
            for storage in (*self.storages[move], *self.storages[moved_value(move)]) if is_move(move) else ():
                found[storage] = max(found[storage], at - 1)
        return found

    @functools.cached_property
    def arriving(self) -> dict[Storage, int]:
        """Position of the op before which a rank waits for what the last step may still move, by what it copies."""
        found: dict[Storage, int] = {}
        for new, old in may_outlast(self.traced, self.waits).items():
            if self.waits[new] == len(self.nodes):  # it ends in no step before
                for storage in self.storages[moved_value(new)]:
                    found[storage] = max(found.get(storage, 0), self.waits[old])
        return found

    def op(self, at: int) -> str:
        return f"{_short(self.nodes[at])} ({info(self.nodes[at]).source or 'no line'})"

    def title(self, storage: Storage) -> str:
        return _short(storage[0])

    def line(self, storage: Storage) -> str:
        return str(info(storage[0]).source or "")

    @functools.cached_property
    def _saved(self) -> set[Storage]:
        return {storage for value in residuals(self.traced) for storage in self.storages[value]}

    @functools.cached_property
    def _returned(self) -> set[fx.Node]:
        return self.traced.returned()

    def kind(self, storage: Storage) -> str:
        node = storage[0]
        if node.op == "placeholder":
            return kind_of_input(node)
        gathers = primitive_name(node) in ("all_gather", "broadcast")
        if node.target is PACK or (gathers and any(user.target in _UNPACKS for user in node.users)):
            return "buckets"
        if gathers or node.target is UNPACK:
            return "gathered"
        users = [user for value in _with_views(node) for user in value.users]
        if any(info(each).role is Role.GRADIENT for each in (node, *users)):
            return "gradients"
        if is_move(node) and storage not in self._saved and node not in self._returned:
            return "transfers"
        if not info(node).backward:
            return "residuals" if storage in self._saved else "temporaries"
        leaves = any(not info(user).backward for user in node.users)  # also the output
        return "gradients" if leaves else "temporaries"


def kind_of_input(node: fx.Node) -> str:
    if info(node).is_parameter:
        return "parameters"
    return "optimizer state" if info(node).is_state else "other inputs"


def _with_views(node: fx.Node) -> list[fx.Node]:
    return list(
        reached([node], lambda n: [user for user in n.users if user.op == "call_function" and view_base(user) is n])
    )


def _short(node: fx.Node) -> str:
    if node.op == "placeholder":
        return str(info(node).path or node.name)
    return node.target._schema.name.split("::")[1] if hasattr(node.target, "_schema") else str(node.name)
