"""Flat 1-D partition of the parameters for ZeRO stages 1 and 2 (Rajbhandari et al., arXiv 1910.02054 §5).

The parameters are concatenated into one vector. Every rank updates one contiguous slice of it, regardless of parameter
boundaries. This takes one reduce-scatter of gradients and one all-gather of new parameters. The work is balanced for
all shapes. Leaves share a vector if they have the same dtype, are split over the same axes, and have the same optimizer
constants. On each rank the vector holds that rank's shards of the leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import optree
import torch

from sharding_specs import Mesh, P, local_shape, shard_leaf, tree_paths, unshard_leaf

from ...functions import PyTree, SpecTree
from ...ir import hollow, is_trained
from ...optim import Optimizer, is_declared_elementwise
from ...stateful import at_rest
from .elementwise import require_declaration_kept, require_elementwise, slice_mismatch, with_constants
from .partitioned_update import update_shards

T = TypeVar("T")

_VECTOR = 64  # elements: each rank's slice is a multiple, because kernels may round a tail differently
_LINE = 64  # bytes: a leaf at an offset that is not a multiple of this is copied out of its vector


class FlatBuffers(NamedTuple):
    """Packed tree of parameters, gradients or a moment. Trained leaves are packed into vectors."""

    vectors: tuple[Any, ...]  # one per group
    rest: list[Any]  # leaves that are not trained


class NoPacking:
    """Packing that changes nothing: every parameter is updated separately. `constants` is None if not declared."""

    groups: tuple[_VectorGroup, ...] = ()

    def __init__(self, params: PyTree, constants: PyTree = None) -> None:
        self.structure, self.like, self.constants = optree.tree_structure(params), params, constants
        self._is_checked = False

    def pack(self, tree: PyTree) -> PyTree:
        return tree

    unpack = pack_whole = unpack_whole = pack

    def spread(self, packed: PyTree, of: Callable[[Any, int], Any]) -> PyTree:
        """Return the tree: no leaf is in a vector."""
        return packed

    def masks(self, flags: Sequence[bool], packed: PyTree) -> PyTree:
        """Arrange one flag per leaf in the tree of the parameters."""
        return self.structure.unflatten(flags)

    def update(self, optimizer: Optimizer, *args: PyTree, specs: tuple[SpecTree, ...]) -> tuple[PyTree, PyTree]:
        """Apply the optimizer's update to gradients, state and parameters with these specs."""
        if getattr(optimizer, "specs", None):
            return optimizer.update(*args, specs[0])
        update = with_constants(optimizer, self.constants)
        if not is_declared_elementwise(optimizer):
            return update_shards(update, args, specs)
        if not self._is_checked and any(spec.axes for spec in optree.tree_leaves(specs)):
            require_elementwise(optimizer, self.like, self.constants)
            self._is_checked = True
        return update(*args)


@dataclass(frozen=True)
class _VectorGroup:
    """Group of leaves that share a vector."""

    dtype: torch.dtype
    axes: tuple[str, ...]  # axes that split its leaves, outermost first
    reduced: frozenset[str]
    constant: Hashable
    leaves: tuple[int, ...]  # indices of the leaves, in path order
    shapes: tuple[tuple[int, ...], ...]  # on one rank
    length: int  # on one rank, padded

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]


class FlatPacking:
    """Packs trees with the structure of the parameters into vectors, per rank or for all ranks.

    A full vector is the concatenation of the ranks' vectors, so the axes that split its leaves split dim 0. The axes
    `over` split the vectors, outermost first. Of `params` only paths, shapes and dtypes matter. `specs` has their
    compute layouts, with the axes of the partial sums of gradients. Parameters with different labels in the tree prefix
    `apart` do not share a vector. Frozen leaves are in no vector.
    """

    def __init__(
        self,
        params: PyTree,
        specs: SpecTree,
        mesh: Mesh,
        over: tuple[str, ...],
        optimizer: Optimizer,
        apart: PyTree = 0,
        frozen: Sequence[bool] | None = None,
    ) -> None:
        require_declared(optimizer)
        self.mesh, self.over, self.params = mesh, over, params
        self.tree, self.paths, leaves = optree.tree_structure(params), tree_paths(params), optree.tree_leaves(params)
        fixed = frozen or [False] * len(leaves)
        packed = [is_trained(leaf) and not each for leaf, each in zip(leaves, fixed, strict=True)]
        self.shapes = [tuple(leaf.shape) if each else None for leaf, each in zip(leaves, packed, strict=True)]
        self.computed = self.tree.flatten_up_to(specs)
        self.kept = [at_rest(spec) for spec in self.computed]
        decide = optimizer.constants
        marks = [self._per_leaf(params, 0 if decide is None else decide(params)), self._per_leaf(params, apart)]
        self.constants, self._is_checked = None if decide is None else self.tree.unflatten(marks[0]), False
        self.groups = self._grouped(leaves, *marks)
        taken = {number for group in self.groups for number in group.leaves}
        self.rest = [number for number in range(len(leaves)) if number not in taken]
        self.structure = optree.tree_structure(self._specs(lambda group: P(), self.kept))
        lengths = [group.length * self._ranks(group).size for group in self.groups]
        vectors = (hollow(leaves[group.leaves[0]], (n,)) for group, n in zip(self.groups, lengths, strict=True))
        self.like = FlatBuffers(tuple(vectors), [leaves[number] for number in self.rest])  # for full shapes

    def _per_leaf(self, params: PyTree, prefix: PyTree) -> list[Any]:
        found: list[Any] = self.tree.flatten_up_to(optree.tree_broadcast_prefix(prefix, params))
        return found

    def _grouped(self, leaves: list[Any], constants: list[Hashable], apart: list[Hashable]) -> tuple[_VectorGroup, ...]:
        found: dict[tuple[torch.dtype, tuple[str, ...], frozenset[str], Hashable, Hashable], list[int]] = {}
        for number, leaf in enumerate(leaves):
            if self.shapes[number] is not None:
                axes = tuple(name for name in self.mesh.axis_names if name in self.kept[number].axes)
                key = (leaf.dtype, axes, self.computed[number].reduced, constants[number], apart[number])
                found.setdefault(key, []).append(number)
        unit = _VECTOR * self.mesh.axis_size(self.over)
        groups = []
        for (dtype, axes, reduced, constant, _), members in found.items():
            shapes = [local_shape(leaves[number].shape, self.kept[number], self.mesh) for number in members]
            length = max(1, -(-sum(map(math.prod, shapes)) // unit)) * unit
            groups.append(_VectorGroup(dtype, axes, reduced, constant, tuple(members), tuple(shapes), length))
        return tuple(groups)

    # --- specs ---

    @property
    def summed(self) -> FlatBuffers:
        """Layout of the gradient vectors that the loss returns: partial sums over the axes of Reduced parameters."""
        return self._specs(lambda group: P(group.axes, reduced=group.reduced), self.computed)

    @property
    def whole(self) -> FlatBuffers:
        """Layout of vectors that are not split over the axes `over`."""
        return self._specs(lambda group: P(group.axes), self.kept)

    @property
    def split(self) -> FlatBuffers:
        """Layout of vectors that are split over the axes `over`, innermost."""
        return self._specs(lambda group: P((*group.axes, *self.over)), self.kept)

    def _specs(self, of_group: Callable[[_VectorGroup], P], of_leaves: list[P]) -> FlatBuffers:
        return FlatBuffers(tuple(map(of_group, self.groups)), [of_leaves[number] for number in self.rest])

    # --- on one rank ---

    def pack(self, tree: PyTree) -> FlatBuffers:
        """Pack the shards of a rank into vectors. Leaves without a gradient stay None."""
        leaves = self.tree.flatten_up_to(tree)
        vectors = tuple(_end_to_end([leaves[number] for number in group.leaves], group) for group in self.groups)
        return FlatBuffers(vectors, [leaves[number] for number in self.rest])

    def unpack(self, packed: FlatBuffers) -> PyTree:
        """Unpack the vectors of a rank into shards. A shard is a view, or a copy if not aligned to a cache line."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for group, vector in zip(self.groups, packed.vectors, strict=True):
            for number, part, begin in _cut(vector, group):
                aligned = begin * vector.dtype.itemsize % _LINE == 0  # else kernels are slow or add in another order
                leaves[number] = part if aligned else part.clone()
        for number, leaf in zip(self.rest, packed.rest, strict=True):
            leaves[number] = leaf
        return self.tree.unflatten(leaves)

    def masks(self, flags: Sequence[bool], packed: FlatBuffers) -> FlatBuffers:
        """Return a mask per vector: the flag that all its leaves share, else a vector of flags. False for the rest."""
        pairs = zip(self.groups, packed.vectors, strict=True)
        found = (_mask([flags[number] for number in group.leaves], group, vector.device) for group, vector in pairs)
        return FlatBuffers(tuple(found), [False] * len(self.rest))

    def update(self, optimizer: Optimizer, *args: PyTree, specs: tuple[SpecTree, ...]) -> tuple[PyTree, PyTree]:
        """Apply the optimizer's update to vectors. It treats each vector as one parameter."""
        constants = (
            None
            if self.constants is None
            else FlatBuffers(tuple(group.constant for group in self.groups), [None] * len(self.rest))
        )
        update = with_constants(optimizer, constants)
        if not self._is_checked:
            require_elementwise(optimizer, self.params, self.constants)
            by_leaf = with_constants(optimizer, self.constants)
            require_declaration_kept(slice_mismatch(optimizer.init, by_leaf, self.params, self._joined, update))
            self._is_checked = True
        return update(*args)

    def _joined(self, tree: PyTree) -> FlatBuffers:
        """Concatenate the leaves of each group, whatever their shapes."""
        leaves = self.tree.flatten_up_to(tree)
        rows = ([leaves[number] for number in group.leaves] for group in self.groups)
        vectors = tuple(
            torch.cat([each.flatten() for each in row]) if torch.is_tensor(row[0]) else row[0] for row in rows
        )
        return FlatBuffers(vectors, [leaves[number] for number in self.rest])

    def spread(self, packed: FlatBuffers, of: Callable[[Any, int], Any]) -> PyTree:
        """Return the tree of the parameters, with `of(vector, index)` for each leaf that is in a vector."""
        leaves = [packed.rest[self.rest.index(i)] if i in self.rest else None for i in range(self.tree.num_leaves)]
        for group, vector in zip(self.groups, packed.vectors, strict=True):
            for number in group.leaves:
                leaves[number] = of(vector, number)
        return self.tree.unflatten(leaves)

    def place(self, number: int) -> tuple[P, int, int]:
        """Return the spec of a leaf's shard, its first element in a rank's vector, and the length of that vector."""
        group = next(group for group in self.groups if number in group.leaves)
        before = group.sizes[: group.leaves.index(number)]
        return self.kept[number], sum(before), group.length

    # --- full vectors ---

    def pack_whole(self, tree: PyTree) -> FlatBuffers:
        """Pack full leaves into full vectors. Leaves of a moment that are no tensors stay one such leaf per vector."""
        leaves = self.tree.flatten_up_to(tree)
        vectors = []
        for group in self.groups:
            if not any(isinstance(leaves[number], torch.Tensor) for number in group.leaves):
                vectors.append(leaves[group.leaves[0]])
                continue
            for number in group.leaves:
                self._require_shape(number, leaves[number])
            mesh, rows = self._ranks(group), []
            for rank in mesh.ranks:
                parts = [shard_leaf(leaves[number], self.kept[number], mesh, rank) for number in group.leaves]
                rows.append(_end_to_end(parts, group))
            vectors.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return FlatBuffers(tuple(vectors), [leaves[number] for number in self.rest])

    def unpack_whole(self, packed: FlatBuffers) -> PyTree:
        """Unpack full vectors into full leaves."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for group, vector in zip(self.groups, packed.vectors, strict=True):
            if not isinstance(vector, torch.Tensor):
                leaves = [vector if number in group.leaves else leaf for number, leaf in enumerate(leaves)]
                continue
            rows = [[part for _, part, _ in _cut(row, group)] for row in vector.split(group.length)]
            for number, parts in zip(group.leaves, zip(*rows, strict=True), strict=True):
                leaves[number] = unshard_leaf(parts, self.kept[number], self._ranks(group)).clone()
        for number, leaf in zip(self.rest, packed.rest, strict=True):
            leaves[number] = leaf
        return self.tree.unflatten(leaves)

    def _ranks(self, group: _VectorGroup) -> Mesh:
        """Mesh of the ranks with different vectors, in the order of their slices in a full vector."""
        return Mesh({axis: self.mesh.axis_size(axis) for axis in group.axes})

    def _require_shape(self, number: int, leaf: T) -> None:
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        if shape != self.shapes[number]:
            raise ValueError(
                f"layout='flat': the optimizer keeps {shape} for {self.paths[number] or 'the parameter'}, which is "
                f"{self.shapes[number]}; a state that lies in vectors has its parameters' shapes. Use layout='dims'"
            )


def require_declared(optimizer: Optimizer) -> None:
    """Check that an optimizer can update a vector of several parameters."""
    if getattr(optimizer, "specs", None) is not None:
        raise ValueError(
            "layout='flat' cuts parameters anywhere, but this optimizer is not elementwise (it has `specs`, as that of "
            "adafactor, whose means go along dims): use layout='dims', or an elementwise one such as fp.optim.adamw"
        )
    if not is_declared_elementwise(optimizer):
        raise ValueError(
            "layout='flat' gives the optimizer several parameters as one, but this one does not say which it treats "
            "alike (weight decay by path, for example): write fp.optim.Optimizer(init, update, elementwise=True) if it "
            "is elementwise, without a norm of a parameter say, and treats all alike; or use layout='dims'"
        )


def _end_to_end(parts: Sequence[torch.Tensor], group: _VectorGroup) -> torch.Tensor:
    """Concatenate tensors into one vector, padded with zeros to the length of the group."""
    flat = [part.reshape(-1) for part in parts]
    missing = group.length - sum(group.sizes)
    if missing:
        flat[-1] = torch.nn.functional.pad(flat[-1], [0, missing])
    return torch.cat(flat)


def _mask(flags: Sequence[bool], group: _VectorGroup, device: torch.device) -> bool | torch.Tensor:
    if len(set(flags)) == 1:
        return flags[0]
    parts = [torch.full(shape, flag, device=device) for flag, shape in zip(flags, group.shapes, strict=True)]
    return _end_to_end(parts, group)


def _cut(vector: torch.Tensor, group: _VectorGroup) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield (leaf index, view, offset) for each leaf of a vector."""
    begins = itertools.accumulate(group.sizes, initial=0)
    for number, shape, size, begin in zip(group.leaves, group.shapes, group.sizes, begins, strict=False):
        yield number, vector.narrow(0, begin, size).view(shape), begin
