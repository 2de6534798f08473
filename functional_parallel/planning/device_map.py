"""Device maps: the memory in which each layer of a model lies between its uses."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from ..errors import BudgetError
from ..program import columns, parse_bytes, readable_bytes
from .by_hand import OFFLOADED, MemoryName, placed_by_hand
from .model_blocks import Block, ModelLeaf, blocks_of, bytes_of_leaves

_ORDER = ("device", *OFFLOADED)


@dataclass(frozen=True)
class MapRow:
    """Line of a device map: a block, or several numbered blocks such as `layers.0-3`, in one memory."""

    path: str
    memory: MemoryName
    bytes: int  # a tied weight counts in its first row
    follows: bool = False  # whether it is where it is only because of a tied weight


@dataclass(frozen=True)
class DeviceMap:
    """Memory of every parameter of a model. Print it for a table.

    Attributes:
        rows: the blocks with their memories. `by_path` as a mapping.
        memories: the memory of each parameter and buffer by path, also by the other paths of tied ones.
        bytes: bytes of the model in each memory.
        free: bytes that each memory keeps free, for the largest layer that comes from a slower memory.
        limits: the bytes that the caller allows in each memory; empty if the layers were placed by hand.
        short: for each memory that could not take another layer, this layer and the bytes that are missing.
    """

    rows: tuple[MapRow, ...]
    memories: Mapping[str, MemoryName]
    bytes: Mapping[MemoryName, int]
    free: Mapping[MemoryName, int] = field(default_factory=dict)
    limits: Mapping[MemoryName, float] = field(default_factory=dict)
    short: Mapping[MemoryName, tuple[str, int]] = field(default_factory=dict)

    @property
    def by_path(self) -> dict[str, MemoryName]:
        """Return the rows as `fp.device_map` takes them for placement by hand."""
        return {row.path: row.memory for row in self.rows}

    @property
    def devices(self) -> list[MemoryName]:
        """Return the devices that run layers, in order. The last one runs what is offloaded."""
        devices = [memory for memory in self.bytes if memory not in OFFLOADED]
        offloaded = any(self.bytes.get(memory) for memory in OFFLOADED)
        return [each for each in devices if self.bytes[each] or (offloaded and each == devices[-1])]

    @property
    def stages(self) -> dict[str, int]:
        """Return the stages of a pipeline over the devices, by path, for `fp.pipeline(stages=…)`."""
        stage = {memory: index for index, memory in enumerate(self.devices)}
        last = max(len(stage) - 1, 0)
        return {row.path: stage.get(row.memory, last) for row in self.rows if row.bytes and not row.follows}

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("layer", "memory", "bytes")]
        table += [(row.path, str(row.memory), readable_bytes(row.bytes)) for row in self.rows]
        sums: list[tuple[str, ...]] = [("memory", "bytes", "kept free", "limit")]
        for memory, size in self.bytes.items():
            limit = self.limits.get(memory, math.inf)
            shown = "none" if limit == math.inf else readable_bytes(int(limit))
            sums.append((str(memory), readable_bytes(size), readable_bytes(self.free.get(memory, 0)), shown))
        missing = [
            f"{path} does not fit in {memory!r}: {readable_bytes(size)} ({size} bytes) are missing"
            for memory, (path, size) in self.short.items()
        ]
        return "\n".join([*columns(table, (2,)), "", *columns(sums, (1, 2, 3)), *missing])


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
    memory    bytes  kept free    limit
    device  2.0 KiB    1.0 KiB  3.0 KiB
    host    2.0 KiB        0 B  8.0 KiB
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
        return _map_of(root, placed_by_hand(root, memories))
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
    keeping_room: set[MemoryName]  # memories through which the layers of slower memories pass
    placed: dict[ModelLeaf, MemoryName] = field(default_factory=dict)
    following: set[ModelLeaf] = field(default_factory=set)  # leaves placed because another leaf of their layer is tied
    used: Counter[MemoryName] = field(default_factory=Counter)
    short: dict[MemoryName, tuple[str, int]] = field(default_factory=dict)

    def run(self) -> DeviceMap:
        queue, order = list(self.root.layers()), list(self.limits)
        sizes = {layer: bytes_of_leaves(layer.leaves) for layer in queue}
        while queue:
            layer, memory = queue[0], order[0]
            new = self._left(layer)
            together = [each for each in queue if each is layer or not new.isdisjoint(each.leaves)]  # by tied weights
            later = [each for each in queue if each not in together]
            leaves, room = self._left(*together), max((sizes[each] for each in later), default=0)
            space = self.limits[memory] - self.used[memory] - (room if memory in self.keeping_room else 0)
            if bytes_of_leaves(leaves) <= space:
                self.placed |= dict.fromkeys(leaves, memory)
                self.used[memory] += bytes_of_leaves(leaves)
                self.following |= leaves - new
                queue = later
            else:
                self.short[memory] = layer.path, int(bytes_of_leaves(leaves) - space)
                del order[0]
            if not order:
                raise BudgetError(self._what_is_missing(memory, queue))
        return self._with_room(_map_of(self.root, self.placed, self.limits, self.following))

    def _left(self, *blocks: Block) -> set[ModelLeaf]:
        return {leaf for block in blocks for leaf in block.leaves if leaf not in self.placed}

    def _with_room(self, found: DeviceMap) -> DeviceMap:
        """Note the room for layers of slower memories, and check that they fit in it."""
        free, order = dict[MemoryName, int](), list(self.limits)
        for memory in filter(self.keeping_room.__contains__, order):
            slower = {each for each in order[order.index(memory) + 1 :] if each in OFFLOADED}
            sizes = {
                layer.path: bytes_of_leaves(leaf for leaf in layer.leaves if self.placed[leaf] in slower)
                for layer in self.root.layers()
            }
            largest = max(sizes, key=sizes.__getitem__)
            free[memory] = sizes[largest]
            if free[memory] > self.limits[memory] - found.bytes[memory]:
                raise BudgetError(
                    f"fp.device_map: {largest} has {_sized(free[memory])}, which must be in {memory!r} while it runs, "
                    f"but {memory!r} has {_sized(int(self.limits[memory]))}: give it more, or split the layer: "
                    "by no_split=, or a linear layer by fp.tiled"
                )
        return replace(found, free=MappingProxyType(free), short=MappingProxyType(self.short))

    def _what_is_missing(self, last: MemoryName, queue: list[Block]) -> str:
        rest = bytes_of_leaves(self._left(*queue))
        missing = rest + self.used[last] - int(self.limits[last])
        held = ", ".join(
            f"{memory!r} takes {readable_bytes(self.used[memory])} of {readable_bytes(int(limit))}"
            for memory, limit in self.limits.items()
        )
        slower = [f"{name!r}" for name in OFFLOADED if name not in self.limits]
        more = f", or a limit to {' or '.join(slower)}" if slower else ""
        return (
            f"fp.device_map: the model has {_sized(bytes_of_leaves(self.root.leaves))}; from {queue[0].path} on, "
            f"{_sized(rest)} are left, and {_sized(missing)} do not fit: {held}. "
            f"Give {last!r} {missing} bytes more{more}"
        )


def _sized(size: int) -> str:
    return f"{size} bytes ({readable_bytes(size)})"


# --- The value ---


def _map_of(
    root: Block,
    placed: Mapping[ModelLeaf, MemoryName],
    limits: Mapping[MemoryName, float] = MappingProxyType({}),
    following: Collection[ModelLeaf] = (),
) -> DeviceMap:
    used = set(placed.values())
    order = list(limits) or sorted(used, key=lambda name: (_ORDER.index(name), 0) if name in _ORDER else (-1, name))
    sizes = {name: bytes_of_leaves(leaf for leaf in placed if placed[leaf] == name) for name in order}
    memories = {name: memory for leaf, memory in placed.items() for name in leaf.names}
    return DeviceMap(
        tuple(_rows(root, placed, set(), following)),
        MappingProxyType(memories),
        MappingProxyType(sizes),
        limits=MappingProxyType(limits),
    )


def _rows(
    block: Block, placed: Mapping[ModelLeaf, MemoryName], seen: set[ModelLeaf], following: Collection[ModelLeaf]
) -> list[MapRow]:
    found = {(placed[leaf], leaf in following) for leaf in block.leaves}
    if len(found) == 1:
        new = set(block.leaves) - seen
        seen |= new
        memory, follows = found.pop()
        return [MapRow(block.path or "*", memory, bytes_of_leaves(new), follows)]
    rows = list[MapRow]()
    for row in itertools.chain.from_iterable(_rows(child, placed, seen, following) for child in block.children):
        joined = _joined(rows[-1], row) if rows else None
        rows[-1:] = [joined] if joined else [*rows[-1:], row]
    return rows


def _joined(first: MapRow, second: MapRow) -> MapRow | None:
    """Return one row for numbered blocks that follow each other in one memory; None for others."""
    one, other = (re.fullmatch(r"(.*[/.]|)(?:(\d+)-)?(\d+)", row.path) for row in (first, second))
    alike = (first.memory, first.follows) == (second.memory, second.follows)
    if one is None or other is None or not alike or one[1] != other[1] or other[2] or int(one[3]) + 1 != int(other[3]):
        return None
    path = f"{one[1]}{one[2] or one[3]}-{other[3]}"
    return replace(first, path=path, bytes=first.bytes + second.bytes)
