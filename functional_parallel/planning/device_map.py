"""Device maps: the memory of each layer of a model between its uses."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import BudgetError
from ..program import columns
from ..quantities import parse_bytes, readable_bytes
from .by_hand import OFFLOADED, MemoryName, placed_by_hand
from .model_blocks import Block, ModelLeaf, blocks_of, bytes_of_leaves

_ORDER = ("device", *OFFLOADED)


@dataclass(frozen=True)
class MapRow:
    path: str  # of a block, or of several numbered ones, such as `layers.0-3`
    memory: MemoryName
    bytes: int  # a tied weight counts in its first row
    follows: bool = False  # whether it is where it is only because of a tied weight
    has_parameters: bool = True  # or only buffers, and further names of tied weights


@dataclass(frozen=True)
class DeviceMap:
    """Memory of every parameter of a model. Print it for a table.

    Attributes:
        memories: the memory of each parameter and buffer by path, also by the other paths of tied ones.
        bytes: bytes of the model in each memory.
        free: bytes that a memory keeps free, for the largest layer that comes from a slower memory.
        copies: bytes on a device of tied weights that lie on another device, beside `bytes`.
        short: for each memory that is full, the first layer that does not fit, and the bytes that are missing.
    """

    rows: tuple[MapRow, ...]
    memories: Mapping[str, MemoryName]
    bytes: Mapping[MemoryName, int]
    limits: Mapping[MemoryName, float]
    free: Mapping[MemoryName, int]
    copies: Mapping[MemoryName, int]
    short: Mapping[MemoryName, tuple[str, int]]

    @property
    def by_path(self) -> dict[str, MemoryName]:
        """Return the rows as `fp.device_map` takes them for placement by hand."""
        return {row.path: row.memory for row in self.rows}

    @property
    def of_parameters(self) -> dict[str, MemoryName]:
        """Return the rows with parameters, as `fp.offload` takes them."""
        return {row.path: row.memory for row in self.rows if row.has_parameters}

    @property
    def devices(self) -> list[MemoryName]:
        """Return the devices that run layers, in order. The last device runs what is offloaded."""
        devices = [memory for memory in self.bytes if memory not in OFFLOADED]
        offloaded = any(self.bytes.get(memory) for memory in OFFLOADED)
        return [each for each in devices if self.bytes[each] or (offloaded and each == devices[-1])]

    @property
    def stages(self) -> dict[str, int]:
        """Return the stages of a pipeline over the devices, by path, for `stages=` of `fp.pipeline`."""
        stage = {memory: index for index, memory in enumerate(self.devices)}
        last = max(len(stage) - 1, 0)
        return {row.path: stage.get(row.memory, last) for row in self.rows if row.bytes and not row.follows}

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("layer", "memory", "bytes")]
        table += [(row.path, str(row.memory), readable_bytes(row.bytes)) for row in self.rows]
        sums: list[tuple[str, ...]] = [("memory", "bytes", "copies", "kept free", "limit")]
        for memory, size in self.bytes.items():
            limit, beside = self.limits[memory], (each.get(memory, 0) for each in (self.copies, self.free))
            shown = "none" if limit == math.inf else readable_bytes(int(limit))
            sums.append((str(memory), *map(readable_bytes, (size, *beside)), shown))
        missing = [
            f"{path} does not fit in {memory!r}: {readable_bytes(size)} ({size} bytes) are missing"
            for memory, (path, size) in self.short.items()
        ]
        return "\n".join([*columns(table, (2,)), "", *columns(sums, (1, 2, 3, 4)), *missing])


def device_map(
    model: Any,
    memories: Mapping[Any, Any],
    *,
    no_split: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> DeviceMap:
    """Choose the memory of each layer of a model from sizes, or place layers by hand.

    >>> import torch, functional_parallel as fp
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(15, 16, device="meta") for _ in range(4)])
    >>> print(fp.device_map(model, {"device": "3KiB", "host": "8KiB"}))
    layer  memory    bytes
    0-1    device  2.0 KiB
    2-3    host    2.0 KiB
    <BLANKLINE>
    memory    bytes  copies  kept free    limit
    device  2.0 KiB     0 B    1.0 KiB  3.0 KiB
    host    2.0 KiB     0 B        0 B  8.0 KiB
    2 does not fit in 'device': 1.0 KiB (1024 bytes) are missing
    >>> fp.device_map(model, {"0-2": "device", "3": "host"}).memories["3.weight"]
    'host'

    Args:
        model: a module, on any device, meta included; `(fn, params)`; or a pytree of parameters.
        memories: bytes by memory, as `{"device": "2GiB", "host": 8 << 30, "disk": math.inf}`. The layers fill the
            device first, then the host, then the disk, in the model's order. Several devices have numbers:
            `{0: "2GiB", 1: "2GiB", "host": "8GiB"}`. Or, to place layers by hand, memories by path:
            `{"layers/0-3": "device", "*": "host"}`. A pattern matches a parameter, or a block with all of its
            parameters. The first pattern that matches wins.
        no_split: classes of modules, or patterns of paths, that must not be split. The default is `_no_split_modules`
            of a Hugging Face model, and without them the numbered layers.
        dtype: dtype of the floating-point parameters, if it is not their own.

    Returns:
        The map. A tied weight is placed once, and blocks with a tied weight lie in one memory. If layers lie on the
        host, the device keeps room for the largest of them, because a layer is on the device while it runs.

    Raises:
        BudgetError: if the layers do not fit. The message has the bytes that are missing.
        SpecError: if a pattern matches nothing, no pattern matches a parameter, or the names of a tied weight are
            placed in two memories.
        ValueError: for unknown memories or classes, and for sizes that are no sizes.
    """
    root = blocks_of(model, no_split, dtype)
    if not memories or not all(isinstance(name, int) or name in _ORDER for name in memories):
        placed = placed_by_hand(root, memories)
        order = sorted({*placed.values()}, key=lambda name: (1, _ORDER.index(name)) if name in _ORDER else (0, name))
        return _Placing(root, dict.fromkeys(order, math.inf), set(), placed).result()
    limits = _limits(memories)
    devices = [name for name in limits if name not in OFFLOADED]
    passed: set[MemoryName] = {"host"} if "disk" in limits else set()
    if len(devices) > 1:
        with suppress(BudgetError):
            found = _Placing(root, limits, passed | {devices[0]}).run()  # Accelerate runs offloaded layers there
            if not any(found.bytes.get(name) for name in OFFLOADED):
                return found
    return _Placing(root, limits, passed | {devices[-1]}).run()  # stages are in order: the last one runs them


def _limits(memories: Mapping[Any, Any]) -> dict[MemoryName, float]:
    numbers: list[MemoryName] = sorted(name for name in memories if isinstance(name, int))
    if bool(numbers) == ("device" in memories):
        raise ValueError(
            f'fp.device_map(memories={dict(memories)!r}): give the bytes of "device", or those of devices by number'
        )
    order = [*numbers, *(name for name in _ORDER if name in memories)]
    return {name: math.inf if memories[name] == math.inf else parse_bytes(memories[name]) for name in order}


@dataclass
class _Placing:
    """Fill the memories with the layers in order, as `accelerate.infer_auto_device_map` does."""

    root: Block
    limits: dict[MemoryName, float]
    keeping_room: set[MemoryName]  # memories that the layers of slower memories pass through
    placed: dict[ModelLeaf, MemoryName] = field(default_factory=dict)
    following: set[ModelLeaf] = field(default_factory=set)  # leaves placed because another leaf of their layer is tied
    copies: dict[MemoryName, set[ModelLeaf]] = field(default_factory=dict)  # of tied weights, on other devices
    used: Counter[MemoryName] = field(default_factory=Counter)
    short: dict[MemoryName, tuple[str, int]] = field(default_factory=dict)

    def run(self) -> DeviceMap:
        queue, order = list(self.root.layers()), list(self.limits)
        sizes = {layer: bytes_of_leaves(layer.leaves) for layer in queue}
        while queue:
            layer, memory = queue[0], order[0]
            new = self._left(layer)
            together = [each for each in queue if each is layer or not new.isdisjoint(each.leaves)]  # by tied weights
            leaves, sizes[layer] = self._left(*together), 0
            runs = memory if memory not in OFFLOADED else self.devices[-1]
            copies, later = self._copies([layer], runs), self._copies(queue, runs)
            room = max(sizes[each] for each in queue if each not in together or each is layer)
            room = room if memory in self.keeping_room else 0
            beside = bytes_of_leaves(later if memory == self.devices[-1] else copies if memory == runs else ())
            missing = bytes_of_leaves(leaves) + beside + room + self.used[memory] - self.limits[memory]
            if missing <= 0:
                self.placed |= dict.fromkeys(leaves, memory)
                self.used[memory] += bytes_of_leaves(leaves)
                self.used[runs] += bytes_of_leaves(copies)
                self.following |= leaves - new
                self.copies[runs] = self.copies.get(runs, set()) | copies
                sizes |= dict.fromkeys(together, 0)
                del queue[0]
            elif copies and not leaves:
                raise BudgetError(
                    f"fp.device_map: {layer.path} needs a copy of a tied weight, {_sized(beside)}, on {runs!r}: give "
                    f"it {int(missing)} bytes more, or fewer to those before"
                )
            else:
                self.short[memory] = layer.path, int(missing)
                del order[0]
            if not order:
                raise BudgetError(self._what_is_missing(memory, queue))
        return self.result()

    @property
    def devices(self) -> list[MemoryName]:
        return [memory for memory in self.limits if memory not in OFFLOADED]

    def _copies(self, layers: Iterable[Block], device: MemoryName) -> set[ModelLeaf]:
        """Return the tied weights of layers that are on other devices, and not on this device yet."""
        leaves = {leaf for layer in layers for leaf in layer.leaves if self.placed.get(leaf) in self.devices}
        return {leaf for leaf in leaves - self.copies.get(device, set()) if self.placed[leaf] != device}

    def _left(self, *blocks: Block) -> set[ModelLeaf]:
        return {leaf for block in blocks for leaf in block.leaves if leaf not in self.placed}

    def result(self) -> DeviceMap:
        order, free = list(self.limits), dict[MemoryName, int]()
        sizes = {memory: bytes_of_leaves(leaf for leaf, at in self.placed.items() if at == memory) for memory in order}
        for memory in filter(self.keeping_room.__contains__, order):
            slower = {*OFFLOADED} & {*order[order.index(memory) + 1 :]}
            moved = [
                (bytes_of_leaves(leaf for leaf in layer.leaves if self.placed[leaf] in slower), layer.path)
                for layer in self.root.layers()
            ]
            free[memory], largest = max(moved, key=lambda each: each[0])
            if free[memory] > self.limits[memory] - self.used[memory]:
                raise BudgetError(
                    f"fp.device_map: {largest} has {_sized(free[memory])}, which must be in {memory!r} while it runs, "
                    f"beside {self.used[memory]} bytes, but {memory!r} has {_sized(int(self.limits[memory]))}: give it "
                    "more, or split the layer: by no_split=, or a linear layer by fp.tiled"
                )
        memories = {name: memory for leaf, memory in self.placed.items() for name in leaf.names}
        copies = {memory: bytes_of_leaves(leaves) for memory, leaves in self.copies.items() if leaves}
        return DeviceMap(tuple(self._rows(self.root, set())), memories, sizes, self.limits, free, copies, self.short)

    def _rows(self, block: Block, seen: set[ModelLeaf]) -> list[MapRow]:
        found = {(self.placed[leaf], leaf in self.following) for leaf in block.leaves}
        if len(found) == 1:
            new = set(block.leaves) - seen
            seen |= new
            memory, follows = found.pop()
            has_parameters = any((leaf.parameter or "/").startswith(block.path) for leaf in block.leaves)
            return [MapRow(block.path or "*", memory, bytes_of_leaves(new), follows, has_parameters)]
        rows = list[MapRow]()
        for row in itertools.chain.from_iterable(self._rows(child, seen) for child in block.children):
            joined = _joined(rows[-1], row) if rows else None
            rows[-1:] = [joined] if joined else [*rows[-1:], row]
        return rows

    def _what_is_missing(self, last: MemoryName, queue: list[Block]) -> str:
        copies = self._copies(queue, last) if last in self.devices else set()
        rest = bytes_of_leaves(self._left(*queue) | copies)
        missing = rest + self.used[last] - int(self.limits[last])
        sizes = {
            memory: (readable_bytes(self.used[memory]), readable_bytes(int(self.limits[memory])))
            for memory in self.limits
        }
        held = ", ".join(f"{memory!r} takes {used} of {limit}" for memory, (used, limit) in sizes.items())
        slower = [repr(name) for name in OFFLOADED if name not in self.limits]
        more = f", or a limit to {' or '.join(slower)}" if slower else ""
        return (
            f"fp.device_map: the model has {_sized(bytes_of_leaves(self.root.leaves))}; from {queue[0].path} on, "
            f"{_sized(rest)} are left, and {_sized(missing)} do not fit: {held}. "
            f"Give {last!r} {missing} bytes more{more}"
        )


def _sized(size: int) -> str:
    return f"{size} bytes ({readable_bytes(size)})"


def _joined(first: MapRow, second: MapRow) -> MapRow | None:
    """Return one row for numbered blocks that follow each other in one memory; None for others."""
    one, other = (re.fullmatch(r"(.*[/.]|)(?:(\d+)-)?(\d+)", row.path) for row in (first, second))
    alike = replace(first, path="", bytes=0) == replace(second, path="", bytes=0)
    if one is None or other is None or not alike or one[1] != other[1] or other[2] or int(one[3]) + 1 != int(other[3]):
        return None
    path = f"{one[1]}{one[2] or one[3]}-{other[3]}"
    return replace(first, path=path, bytes=first.bytes + second.bytes)
