"""Strides and memory of traced values: known where eager torch would have the same, refused elsewhere.

A trace has values alone. An op that depends on how its operand is stored is recorded as an op on values, from the
strides that the operand has during the trace. These are the fake tensor's, which has those of eager torch under two
conditions. The arguments must be contiguous: the trace notes which arguments matter, and calls check them. And no op in
between may be recorded as another op: results of such ops have unknown strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import fx

from .. import _torch
from ..errors import MemoryLayoutError
from ..ir import Traced, argument, current_source, operands_of

__all__ = ["LayoutRead", "Layouts", "require_contiguous"]

aten = torch.ops.aten

_CONTIGUOUS_RESULTS = {  # of operands with any strides
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.embedding.default),
    *(aten.native_layer_norm.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.stack.default),
}


@dataclass(frozen=True)
class LayoutRead:
    """An op with its source line that depends on the strides of an argument; `offset`: on its storage offset too."""

    what: str
    offset: bool = False

    def joined(self, other: LayoutRead | None) -> LayoutRead:
        return self if other is None else replace(other, offset=self.offset or other.offset)


def require_contiguous(x: torch.Tensor, read: LayoutRead, path: str) -> None:
    """Check an argument whose strides a trace depends on.

    Args:
        x: the argument.
        read: the op that depends on them.
        path: the argument's path, for the error.

    Raises:
        MemoryLayoutError: when it is stored differently.
    """
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
    """Two storages, by number, that are one in eager torch: surely, or if the strides of the first's tensor allow."""

    source: int
    result: int
    shape: tuple[int, ...]
    what: str
    surely: bool


class Layouts:
    """The memory of a recording's tensors: which op made each storage, and what is not known of it.

    Args:
        traced: the graph of the trace.
        node_of: returns the node of a tensor.
        living: returns the tensors of the trace that are still in use.
        outer: the memory of the trace around this one.
    """

    def __init__(
        self,
        traced: Traced,
        node_of: Callable[[torch.Tensor], fx.Node],
        living: Callable[[], Iterable[torch.Tensor]],
        outer: Layouts | None,
    ) -> None:
        self._traced, self._node_of, self._living, self._outer = traced, node_of, living, outer
        self._made: dict[int, tuple[Any, fx.Node]] = {}  # the storage, so that its number stays its own
        self._storage_of: dict[fx.Node, int] = {}
        self._unknown: dict[int, str] = {}
        self._pairs: dict[int, list[_Pair]] = {}

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Note the storage that a node's tensor is in; a sparse tensor has none."""
        if tensor.layout is not torch.strided:
            return
        with _torch.disable_torch_function():
            storage = tensor.untyped_storage()
        key = storage._cdata
        self._made.setdefault(key, (storage, node))
        self._storage_of[node] = key

    def is_new(self, tensor: torch.Tensor, than: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor is in memory of this trace that none of the others is in."""
        key = _key(tensor)
        return key in self._made and all(_key(other) != key for other in than)

    def leave_unknown(self, results: Any, operands: Any, what: str) -> None:
        """Note that another op was recorded for the one that made these results, whose strides may differ."""
        given = [_torch.unwrap(x) for x in _tensors(operands)]
        for x in _tensors(results):
            plain = _torch.unwrap(x)
            if self.is_new(plain, given):
                self._unknown[_key(plain)] = f"{what} at {current_source() or 'an unknown line'}"

    # --- what an op that depends on strides asks ---

    def require_known(self, tensor: torch.Tensor, what: str, offset: bool = False) -> None:
        """Note that the trace depends on a tensor's strides.

        Args:
            tensor: a tensor without wrappers.
            what: the op that depends on them.
            offset: whether it depends on the storage offset as well.

        Raises:
            MemoryLayoutError: when they may differ from those in eager torch.
        """
        self.require_read(tensor, LayoutRead(f"{current_source() or 'the function'}: {what}", offset))

    def require_read(self, tensor: torch.Tensor, read: LayoutRead) -> None:
        """Note that a trace inside of this one depends on a tensor's strides."""
        self._node_of(tensor)
        self._require(_key(tensor), tuple(tensor.shape), read)

    def _require(self, storage: int, shape: tuple[int, ...], read: LayoutRead) -> None:
        traced = self._traced
        for key, node in self._sources(storage):
            if key in self._unknown:
                raise MemoryLayoutError(
                    f"{read.what} depends on the memory layout of a tensor of shape {shape}, which comes from "
                    f"{self._unknown[key]}; its strides in a program are not those of eager torch; take "
                    ".clone(memory_format=torch.contiguous_format) before, or index it"
                )
            if node in traced.inputs:
                index = traced.inputs.index(node)
                traced.layout_reads[index] = read.joined(traced.layout_reads.get(index))
            elif node in traced.captured_inputs and self._outer is not None:
                captured = traced.captured[traced.captured_inputs.index(node)]
                self._outer._require(_key(captured), shape, read)

    def _sources(self, storage: int) -> Iterator[tuple[int, fx.Node]]:
        """The storages that the strides in one depend on: inputs, and results of unknown strides."""
        pending, seen = [storage], set[int]()
        while pending:
            key = pending.pop()
            if key in seen or key not in self._made:
                continue
            seen.add(key)
            node = self._made[key][1]
            if node.op == "placeholder" or key in self._unknown:
                yield key, node
            elif not _is_contiguous(node):
                pending += [self._storage_of[each] for each in operands_of(node) if each in self._storage_of]

    # --- tensors that share memory or not, by their strides ---

    def pair(self, source: torch.Tensor, result: torch.Tensor, what: str, surely: bool = False) -> None:
        """Note that a tensor is a view of another, or a copy, as the strides of that allow."""
        what = f"{what} at {current_source() or 'an unknown line'}"
        pair = _Pair(_key(source), _key(result), tuple(source.shape), what, surely)
        for key in {pair.source, pair.result}:
            self._pairs.setdefault(key, []).append(pair)

    def check_write(self, target: torch.Tensor, op: Any) -> None:
        """Check that the values that a write changes do not depend on unknown strides.

        Raises:
            MemoryLayoutError: when another tensor that is alive may share the target's memory in eager torch, or not.
        """
        key = _key(target)
        if key not in self._pairs:
            return
        living = {_key(tensor) for tensor in self._living() if tensor is not target}
        for pair in self._pairs[key]:
            other = pair.result if key == pair.source else pair.source
            if other != key and other not in living:
                continue
            where = (
                f"{current_source() or 'the function'}: {op} changes in place a tensor of shape {tuple(target.shape)}"
            )
            if pair.surely:
                raise MemoryLayoutError(
                    f"{where} that shares its memory by {pair.what}, and the values of the other tensor are not known "
                    "then; use the out-of-place op"
                )
            self._require(pair.source, pair.shape, LayoutRead(f"{where}, shared by {pair.what} or not, which"))


def _is_contiguous(node: fx.Node) -> bool:
    if node.target in _CONTIGUOUS_RESULTS:
        return True
    return node.target is aten.clone.default and argument(node, "memory_format") is torch.contiguous_format


def _key(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -1
    with _torch.disable_torch_function():
        return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
