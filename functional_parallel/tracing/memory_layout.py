"""Strides and memory of traced values: known where eager torch would have the same, refused elsewhere.

A trace has only values. An op that depends on the storage of its operand is recorded as an op on values, computed from
the strides of the fake tensor. The fake tensor has the strides of eager torch under two conditions:

- The arguments are contiguous. The trace records which arguments must be, and calls check them.
- No op in between is recorded as another op. Results of such ops have unknown strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import fx
from torch.fx.node import Argument

from .. import _torch
from ..errors import MemoryLayoutError
from ..ir import Traced, argument, current_source, operands_of

aten = torch.ops.aten

_CONTIGUOUS_RESULTS = {  # of operands with any strides
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.embedding.default),
    *(aten.native_layer_norm.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.stack.default),
}


@dataclass(frozen=True)
class LayoutRead:
    what: str  # description of the op, with its source line
    offset: bool = False  # whether it also depends on the storage offset

    def joined(self, other: LayoutRead | None) -> LayoutRead:
        return self if other is None else replace(other, offset=self.offset or other.offset)


def require_contiguous(x: torch.Tensor, read: LayoutRead, path: str) -> None:
    shifted = x.is_contiguous() and x.storage_offset() != 0
    if x.is_contiguous() and not (shifted and read.offset):
        return
    found = f"storage offset {x.storage_offset()}" if shifted else f"strides {tuple(x.stride())}"
    raise MemoryLayoutError(
        f"{read.what} depends on the memory layout of {path or 'the argument'}, of shape {tuple(x.shape)}, which has "
        f"{found}; a program takes its arguments as contiguous: pass it .{'clone' if shifted else 'contiguous'}()"
    )


@dataclass(frozen=True)
class _Pair:
    """Two storages, by number, that are one storage in eager torch."""

    source: int
    result: int
    shape: tuple[int, ...]
    what: str
    surely: bool  # if not set, it depends on the strides of the source tensor


class LayoutsOfCall(NamedTuple):
    """What is known of the results of the ops of a call."""

    storages: dict[fx.Node, int]
    makers: dict[int, fx.Node]  # of the storages that the call made
    unknown: dict[int, str]
    pairs: list[_Pair]


class Layouts:
    """Storages of the tensors of a recording: the op that created each, and whether its strides are known."""

    def __init__(
        self,
        traced: Traced,
        node_of: Callable[[torch.Tensor], fx.Node],
        living: Callable[[], Iterable[torch.Tensor]],
        outer: Layouts | None,
    ) -> None:
        self._traced, self._node_of, self._living, self._outer = traced, node_of, living, outer
        self._made: dict[int, tuple[Any, fx.Node]] = {}  # holds the storage, so that its number is not reused
        self._storage_of: dict[fx.Node, int] = {}
        self._unknown: dict[int, str] = {}
        self._required: dict[bool, set[int]] = {False: set(), True: set()}  # by `offset`: storages with known strides
        self._inputs: dict[fx.Node, int] = {}  # with their numbers
        self._captured: dict[fx.Node, int] = {}
        self._pairs: dict[int, list[_Pair]] = {}
        self.paired: list[_Pair] = []  # all of them, in order
        self.strides_read = 0  # times that the function depended on strides

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = _storage(tensor)
        key = storage._cdata
        self._made.setdefault(key, (storage, node))
        self._storage_of[node] = key

    def leave_unknown(self, results: Argument, operands: Argument, what: str) -> None:
        """Record that another op than the one called computed these results. Their strides may differ."""
        given = {storage_key(_torch.unwrap(x)) for x in _tensors(operands)}
        for x in _tensors(results):
            key = storage_key(_torch.unwrap(x))
            if key in self._made and key not in given:
                self._unknown[key] = f"{what} at {current_source() or 'an unknown line'}"

    # --- ops of a call that are copied ---

    def of(self, nodes: Collection[fx.Node], pairs: int) -> LayoutsOfCall:
        """Return what is known of the results of a call now, before which there were so many pairs."""
        storages = {node: self._storage_of[node] for node in nodes if node in self._storage_of}
        makers = {key: self._made[key][1] for key in storages.values() if self._made[key][1] in storages}
        unknown = {key: self._unknown[key] for key in makers if key in self._unknown}
        return LayoutsOfCall(storages, makers, unknown, self.paired[pairs:])

    def copy(
        self, known: LayoutsOfCall, copies: Mapping[fx.Node, fx.Node], tensors: Mapping[int, torch.Tensor]
    ) -> None:
        """Record of copies of a call's ops what is known of the ops.

        `tensors` are the tensors in the copies of storages, by number. Copies without a tensor get negative numbers.
        """
        keys = {old: storage_key(tensor) for old, tensor in tensors.items()}
        for old, maker in known.makers.items():
            key = keys.setdefault(old, -2 - len(self._made))
            self._made.setdefault(key, (_storage(tensors[old]) if old in tensors else None, copies[maker]))
            if old in known.unknown:
                self._unknown[key] = known.unknown[old]
        self._storage_of.update((copies[node], keys.get(old, old)) for node, old in known.storages.items())
        for pair in known.pairs:
            source, result = (keys.get(each, each) for each in (pair.source, pair.result))
            self._add(replace(pair, source=source, result=result))

    def made_by(self, storage: int) -> fx.Node | None:
        return self._made.get(storage, (None, None))[1]

    # --- ops that depend on strides ---

    def require_known(self, tensor: torch.Tensor, what: str, offset: bool = False) -> None:
        """Record that the trace depends on the strides of a tensor without wrappers, and refuse unknown strides."""
        self.require_read(tensor, LayoutRead(f"{current_source() or 'the function'}: {what}", offset))

    def require_read(self, tensor: torch.Tensor, read: LayoutRead) -> None:
        self._node_of(tensor)
        self._require(storage_key(tensor), tuple(tensor.shape), read)

    def _require(self, storage: int, shape: tuple[int, ...], read: LayoutRead) -> None:
        self.strides_read += 1
        traced, seen = self._traced, set[int]()
        inputs, captured = _numbered(self._inputs, traced.inputs), _numbered(self._captured, traced.captured_inputs)
        for key, node in self._sources(storage, self._required[read.offset], seen):
            if key in self._unknown:
                raise MemoryLayoutError(
                    f"{read.what} depends on the memory layout of a tensor of shape {shape}, a result of "
                    f"{self._unknown[key]}. Its strides in a program and in eager torch differ. Use "
                    ".clone(memory_format=torch.contiguous_format) before, or index it"
                )
            if node in inputs:
                traced.layout_reads[inputs[node]] = read.joined(traced.layout_reads.get(inputs[node]))
            elif node in captured and self._outer is not None:
                self._outer._require(storage_key(traced.captured[captured[node]]), shape, read)
        for offset in {False, read.offset}:
            self._required[offset] |= seen

    def _sources(self, storage: int, known: Container[int], seen: set[int]) -> Iterator[tuple[int, fx.Node]]:
        """Yield the storages that determine the strides in `storage`: inputs, and results with unknown strides."""
        pending = [storage]
        while pending:
            key = pending.pop()
            if key in seen or key in known or key not in self._made:
                continue
            seen.add(key)
            node = self._made[key][1]
            if node.op == "placeholder" or key in self._unknown:
                yield key, node
            elif not _is_contiguous(node):
                pending += [self._storage_of[each] for each in operands_of(node) if each in self._storage_of]

    # --- tensors that share memory or not, by their strides ---

    def pair(self, source: torch.Tensor, result: torch.Tensor, what: str, surely: bool = False) -> None:
        """Record that `result` is a view of `source`: surely, or only if the strides of `source` allow it."""
        what = f"{what} at {current_source() or 'an unknown line'}"
        pair = _Pair(storage_key(source), storage_key(result), tuple(source.shape), what, surely)
        self._add(pair)

    def _add(self, pair: _Pair) -> None:
        self.paired.append(pair)
        for key in {pair.source, pair.result}:
            self._pairs.setdefault(key, []).append(pair)

    def check_write(self, target: torch.Tensor, op: _torch.Op) -> None:
        """Check that the values changed by a write do not depend on unknown strides."""
        key = storage_key(target)
        if key not in self._pairs:
            return
        living = {storage_key(tensor) for tensor in self._living() if tensor is not target}
        for pair in self._pairs[key]:
            other = pair.result if key == pair.source else pair.source
            if other != key and other not in living:
                continue
            where = (
                f"{current_source() or 'the function'}: {op} changes in place a tensor of shape {tuple(target.shape)}"
            )
            if pair.surely:
                raise MemoryLayoutError(
                    f"{where} that shares its memory by {pair.what}. The new values of the other tensor are unknown; "
                    "use the out-of-place op"
                )
            self._require(pair.source, pair.shape, LayoutRead(f"{where}, shared by {pair.what} or not, which"))


def _numbered(numbers: dict[fx.Node, int], nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    for index in range(len(numbers), len(nodes)):
        numbers[nodes[index]] = index
    return numbers


def _is_contiguous(node: fx.Node) -> bool:
    is_copy = node.target is aten.clone.default and argument(node, "memory_format") is torch.contiguous_format
    return is_copy or node.target in _CONTIGUOUS_RESULTS


def storage_key(tensor: torch.Tensor) -> int:
    return int(_storage(tensor)._cdata) if tensor.layout is torch.strided else -1


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with _torch.disable_torch_function():
        return tensor.untyped_storage()


def _tensors(tree: Argument) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
