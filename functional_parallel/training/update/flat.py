"""Parameters end to end in one vector: the 1-D partition of ZeRO-1 and 2 (Rajbhandari et al., arXiv 1910.02054 §5).

Every rank updates one run of the vector, wherever parameters begin and end in it: one reduce-scatter of gradients, one
all-gather of new parameters, and a balance that no shape disturbs. Leaves share a vector where they have one dtype, are
split over the same axes, and are treated alike by the optimizer; on each rank it holds that rank's shards of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import Mesh, P, local_shape, shard_leaf, tree_paths, unshard_leaf

from ...functions import PyTree, SpecTree
from ...ir import hollow, is_trained
from ...optim import Optimizer, is_known_elementwise
from .elementwise import Call, Update, of_shape, require_promise_kept, update_mismatch
from .partitioned_update import check_elementwise, update_shards
from .update_layout import at_rest, tree_map_params

__all__ = ["FlatBuffers", "FlatPacking", "NoPacking", "require_elementwise"]

_VECTOR = 64  # elements: a multiple per rank, so that kernels meet no tail, which they may round otherwise
_LINE = 64  # bytes: a leaf that begins elsewhere than at a multiple of them is copied out of its vector


class FlatBuffers(NamedTuple):
    """A tree of parameters, of gradients or of a moment, with what is trained in vectors."""

    vectors: tuple[Any, ...]  # one per group
    rest: list[Any]  # leaves that are not trained


class NoPacking:
    """Every parameter is updated by itself: packing changes nothing.

    Args:
        params: the parameters.
        constants: what the optimizer treats each differently by, where it says so.
    """

    groups: tuple[_Group, ...] = ()

    def __init__(self, params: PyTree, constants: PyTree = None) -> None:
        self.structure, self.like, self.constants = optree.tree_structure(params), params, constants
        self._is_checked = False

    def pack(self, tree: PyTree) -> PyTree:
        return tree

    unpack = pack_whole = unpack_whole = pack

    def masks(self, flags: Sequence[bool]) -> PyTree:
        """The flags of the parameters' leaves, as the optimizer sees the parameters."""
        return self.structure.unflatten(flags)

    def update(self, optimizer: Optimizer, *args: PyTree, specs: tuple[SpecTree, ...]) -> tuple[PyTree, PyTree]:
        """The optimizer's update of gradients, state and parameters that lie as the specs say."""
        if getattr(optimizer, "specs", None):
            return optimizer.update(*args, specs[0])
        if self.constants is not None:
            update = partial(optimizer.update, constants=self.constants)
            if not (self._is_checked or is_known_elementwise(optimizer.update)):
                check_elementwise(update, args, specs)
                self._is_checked = True
            return update(*args)
        return update_shards(optimizer.update, args, specs)


@dataclass(frozen=True)
class _Group:
    """Leaves that share a vector."""

    dtype: torch.dtype
    axes: tuple[str, ...]  # that split its leaves, outermost first
    reduced: frozenset[str]
    constant: Hashable
    leaves: tuple[int, ...]  # their numbers, in path order
    shapes: tuple[tuple[int, ...], ...]  # on one rank
    length: int  # on one rank, filled up

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]


class FlatPacking:
    """Packs trees shaped like the parameters into vectors: a rank's own, or whole ones.

    A whole vector is the ranks' vectors one after another, so that the axes that split its leaves split dim 0.

    Args:
        params: the whole parameters, of which only paths, shapes and dtypes count.
        specs: how each is computed with: split over some axes, its gradient wanted as partial sums over others.
        mesh: the mesh.
        over: the axes that split the vectors, the first one outermost.
        optimizer: says by its `constants` which parameters it treats alike.
        apart: a tree of what else tells parameters apart, that shall not share a vector.
    """

    def __init__(
        self,
        params: PyTree,
        specs: SpecTree,
        mesh: Mesh,
        over: tuple[str, ...],
        optimizer: Optimizer,
        apart: PyTree = 0,
    ) -> None:
        require_elementwise(optimizer)
        assert optimizer.constants is not None
        self.mesh, self.over = mesh, over
        self.tree, self.paths, leaves = optree.tree_structure(params), tree_paths(params), optree.tree_leaves(params)
        self.shapes = [tuple(leaf.shape) if is_trained(leaf) else None for leaf in leaves]
        self.computed = self.tree.flatten_up_to(specs)
        self.kept = [at_rest(spec) for spec in self.computed]
        marks = [self._per_leaf(params, optimizer.constants(params)), self._per_leaf(params, apart)]
        self.constants, self._is_checked = self.tree.unflatten(marks[0]), False
        self.groups = self._grouped(leaves, *marks)
        taken = {number for group in self.groups for number in group.leaves}
        self.rest = [number for number in range(len(leaves)) if number not in taken]
        self.structure = optree.tree_structure(self._specs(lambda group: P(), self.kept))
        lengths = [group.length * self._ranks(group).size for group in self.groups]
        vectors = (hollow(leaves[group.leaves[0]], (n,)) for group, n in zip(self.groups, lengths, strict=True))
        self.like = FlatBuffers(tuple(vectors), [leaves[number] for number in self.rest])  # whole, for their shapes

    def _per_leaf(self, params: PyTree, prefix: PyTree) -> list[Any]:
        return self.tree.flatten_up_to(optree.tree_broadcast_prefix(prefix, params))

    def _grouped(self, leaves: list[Any], constants: list[Hashable], apart: list[Hashable]) -> tuple[_Group, ...]:
        found: dict[tuple[torch.dtype, tuple[str, ...], frozenset[str], Hashable, Hashable], list[int]] = {}
        for number, leaf in enumerate(leaves):
            if is_trained(leaf):
                axes = tuple(name for name in self.mesh.axis_names if name in self.kept[number].axes)
                key = (leaf.dtype, axes, self.computed[number].reduced, constants[number], apart[number])
                found.setdefault(key, []).append(number)
        unit = _VECTOR * self.mesh.axis_size(self.over)
        groups = []
        for (dtype, axes, reduced, constant, _), members in found.items():
            shapes = [local_shape(leaves[number].shape, self.kept[number], self.mesh) for number in members]
            length = max(1, -(-sum(map(math.prod, shapes)) // unit)) * unit
            groups.append(_Group(dtype, axes, reduced, constant, tuple(members), tuple(shapes), length))
        return tuple(groups)

    # --- specs ---

    @property
    def summed(self) -> FlatBuffers:
        """How vectors of gradients come out of the loss: partial sums wherever the parameters are reduced."""
        return self._specs(lambda group: P(group.axes, reduced=group.reduced), self.computed)

    @property
    def whole(self) -> FlatBuffers:
        """How vectors lie that these axes do not split."""
        return self._specs(lambda group: P(group.axes), self.kept)

    @property
    def split(self) -> FlatBuffers:
        """How vectors lie that these axes split, inside all others."""
        return self._specs(lambda group: P((*group.axes, *self.over)), self.kept)

    def _specs(self, of_group: Callable[[_Group], P], of_leaves: list[P]) -> FlatBuffers:
        return FlatBuffers(tuple(map(of_group, self.groups)), [of_leaves[number] for number in self.rest])

    # --- on one rank ---

    def pack(self, tree: PyTree) -> FlatBuffers:
        """A rank's vectors, from its shards; None where there is no gradient."""
        leaves = self.tree.flatten_up_to(tree)
        vectors = tuple(_end_to_end([leaves[number] for number in group.leaves], group) for group in self.groups)
        return FlatBuffers(vectors, [leaves[number] for number in self.rest])

    def unpack(self, packed: FlatBuffers) -> PyTree:
        """A rank's shards, from its vectors: views, but for those that would begin within a line of memory."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for group, vector in zip(self.groups, packed.vectors, strict=True):
            for number, part, begin in _cut(vector, group):
                aligned = begin * group.dtype.itemsize % _LINE == 0  # kernels are slow elsewhere, or add otherwise
                leaves[number] = part if aligned else part.clone()
        for number, leaf in zip(self.rest, packed.rest, strict=True):
            leaves[number] = leaf
        return self.tree.unflatten(leaves)

    def masks(self, flags: Sequence[bool]) -> FlatBuffers:
        """For every vector True or False where its leaves' flags agree, else a vector of them; False for the rest."""
        return FlatBuffers(
            tuple(_mask([flags[number] for number in g.leaves], g) for g in self.groups), [False] * len(self.rest)
        )

    def update(self, optimizer: Optimizer, *args: PyTree, specs: tuple[SpecTree, ...]) -> tuple[PyTree, PyTree]:
        """The optimizer's update of vectors: to it each is one parameter."""
        constants = FlatBuffers(tuple(group.constant for group in self.groups), [None] * len(self.rest))
        update = partial(optimizer.update, constants=constants)
        if not (self._is_checked or is_known_elementwise(optimizer.update)):
            require_promise_kept(self._beyond_vectors(optimizer, update, args), _LAY_APART)
            self._is_checked = True
        return update(*args)

    def _beyond_vectors(self, optimizer: Optimizer, update: Update, args: tuple[PyTree, ...]) -> str | None:
        """What keeps an update from doing to every element of a vector what it does to it in its parameter."""
        numbers = itertools.count()
        named = optree.tree_map(lambda leaf: f"{next(numbers)}" if isinstance(leaf, torch.Tensor) else False, args)
        whole = self._apart(args, lambda leaf, number: of_shape(leaf, self.shapes[number] or ()))
        names, numbered = self._apart(named, lambda name, _: name), self._apart(named, lambda _, number: number)
        labels = [None if isinstance(each, str) else each for each in _named(numbered)]
        by_leaf = Call(partial(optimizer.update, constants=self.constants), whole, _named(names))
        return update_mismatch(by_leaf, Call(update, args, _named(named)), labels, "a vector of several parameters")

    def _apart(self, args: tuple[PyTree, ...], of: Callable[[Any, int], Any]) -> tuple[PyTree, ...]:
        """Gradients, state and parameters with, in the place of vectors, what is said of each leaf in them."""

        def spread(packed: FlatBuffers) -> PyTree:
            leaves = [packed.rest[self.rest.index(i)] if i in self.rest else None for i in range(self.tree.num_leaves)]
            for group, vector in zip(self.groups, packed.vectors, strict=True):
                for number in group.leaves:
                    leaves[number] = of(vector, number)
            return self.tree.unflatten(leaves)

        gradients, state, params = args
        return spread(gradients), tree_map_params(spread, state, self.structure), spread(params)

    # --- whole ---

    def pack_whole(self, tree: PyTree) -> FlatBuffers:
        """Whole vectors, from whole leaves.

        Raises:
            ValueError: when a leaf has not its parameter's shape, so that no place in a vector is its own.
        """
        leaves = self.tree.flatten_up_to(tree)
        for number in (number for group in self.groups for number in group.leaves):
            self._require_shape(number, leaves[number])
        vectors = []
        for group in self.groups:
            mesh, rows = self._ranks(group), []
            for rank in mesh.ranks:
                parts = [shard_leaf(leaves[number], self.kept[number], mesh, rank) for number in group.leaves]
                rows.append(_end_to_end(parts, group))
            vectors.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return FlatBuffers(tuple(vectors), [leaves[number] for number in self.rest])

    def unpack_whole(self, packed: FlatBuffers) -> PyTree:
        """Whole leaves, from whole vectors."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for group, vector in zip(self.groups, packed.vectors, strict=True):
            rows = [[part for _, part, _ in _cut(row, group)] for row in vector.split(group.length)]
            for number, parts in zip(group.leaves, zip(*rows, strict=True), strict=True):
                leaves[number] = unshard_leaf(parts, self.kept[number], self._ranks(group)).clone()
        for number, leaf in zip(self.rest, packed.rest, strict=True):
            leaves[number] = leaf
        return self.tree.unflatten(leaves)

    def _ranks(self, group: _Group) -> Mesh:
        """The ranks that hold different vectors, in the order in which a whole vector has them."""
        return Mesh({axis: self.mesh.axis_size(axis) for axis in group.axes})

    def _require_shape(self, number: int, leaf: Any) -> None:
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        if shape != self.shapes[number]:
            raise ValueError(
                f"layout='flat': the optimizer keeps {shape} for {self.paths[number] or 'the parameter'}, which is "
                f"{self.shapes[number]}; a state that lies in vectors has its parameters' shapes. Use layout='dims'"
            )


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be given a vector made of several parameters.

    Raises:
        ValueError: when it is not elementwise, or does not say by what it treats parameters differently.
    """
    if getattr(optimizer, "specs", None) is not None:
        raise ValueError(
            "layout='flat' cuts parameters anywhere, but this optimizer is not elementwise (it has `specs`, as that of "
            "adafactor, whose means go along dims): use layout='dims', or an elementwise one such as fp.optim.adamw"
        )
    if getattr(optimizer, "constants", None) is None:
        raise ValueError(
            "layout='flat' gives the optimizer several parameters as one, but this one does not say which it treats "
            "alike (weight decay by path, for example): write fp.optim.Optimizer(init, update, constants=lambda "
            "params: 0) if it is elementwise, without a norm of a parameter say, and treats all alike, with "
            "update(grads, state, params, constants=None); or use layout='dims'"
        )


_LAY_APART = (
    "Use layout='dims', and leave `constants` away: the update is then partitioned, and `explain` lists what it sends; "
    "what differs from parameter to parameter alone, `constants` can say"
)


def _named(tree: PyTree) -> list[Any]:
    return [each for each in optree.tree_leaves(tree) if each is not False]


def _end_to_end(parts: Sequence[torch.Tensor], group: _Group) -> torch.Tensor:
    """One vector of several tensors, with zeros behind the last."""
    flat = [part.reshape(-1) for part in parts]
    missing = group.length - sum(group.sizes)
    if missing:
        flat[-1] = torch.nn.functional.pad(flat[-1], [0, missing])
    return torch.cat(flat)


def _mask(flags: Sequence[bool], group: _Group) -> bool | torch.Tensor:
    if len(set(flags)) == 1:
        return flags[0]
    return _end_to_end([torch.full(shape, flag) for flag, shape in zip(flags, group.shapes, strict=True)], group)


def _cut(vector: torch.Tensor, group: _Group) -> Iterator[tuple[int, torch.Tensor, int]]:
    """The tensors that a vector is made of, as views: number, tensor, where it begins."""
    begins = itertools.accumulate(group.sizes, initial=0)
    for number, shape, size, begin in zip(group.leaves, group.shapes, group.sizes, begins, strict=False):
        yield number, vector.narrow(0, begin, size).view(shape), begin
