"""Split of full tensors into shards, and reassembly, by indexing, concatenation and sums of partial sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import optree
import torch

from .blocks import Blocks, by_block, by_rank, units
from .errors import SpecError
from .mesh import Mesh
from .pytree import SpecTree, Tree
from .spec import P
from .trees import broadcast_specs, tree_paths
from .validate import misfits, require_dims, validate

T = TypeVar("T", bound=Tree)


def local_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one rank's shard.

    >>> local_shape((8, 6), P(("data", "tensor"), None), Mesh(data=2, tensor=2))
    (2, 6)

    Args:
        shape: the global shape.
        spec: spec of the tensor.
        mesh: the mesh.

    Raises:
        SpecError: when a dim is not divisible, the spec has more dims, or the mesh does not have one of its axes.
    """
    _check(shape, spec, mesh)
    sizes = list(padded_shape(shape, spec, mesh) if spec.padded else shape)
    for axis, dim, _ in spec.placements(mesh):
        sizes[dim] //= mesh.axis_size(axis)
    return tuple(sizes)


def whole_shape(local: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the global shape of a tensor with shards of shape `local`. The inverse of `local_shape`.

    >>> whole_shape((3, 2), P("data", padded={0: 5}), Mesh(data=2))
    (5, 2)

    Args:
        local: shape of one rank's shard.
        spec: spec of the tensor.
        mesh: the mesh.
    """
    sizes = list(local)
    for axis, dim, _ in spec.placements(mesh):
        sizes[dim] *= mesh.axis_size(axis)
    for dim, size in spec.padded.items():
        sizes[dim] = size
    return tuple(sizes)


def padded_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape with every sharded dim rounded up to a multiple of its number of ranks.

    >>> padded_shape((5, 3), P("data"), Mesh(data=4))
    (8, 3)

    Args:
        shape: the global shape.
        spec: spec of the tensor. It must not shard inner factors of a dim that needs padding.
        mesh: the mesh.

    Raises:
        SpecError: when the spec shards an inner factor of a dim that is not divisible, or does not fit the shape or
            the mesh.
    """
    _check(shape, spec, mesh, pad=True)
    sizes = list(shape)
    for dim, axes in enumerate(spec.dim_axes()):
        blocks = mesh.axis_size(axes)
        if all(isinstance(factor, str) for factor in spec.dims[dim]):
            sizes[dim] = -(-sizes[dim] // blocks) * blocks
    return tuple(sizes)


def _check(shape: Sequence[int], spec: P, mesh: Mesh, *, pad: bool = False) -> None:
    if problems := misfits(shape, spec, mesh, pad=pad):
        raise SpecError(f"shape {tuple(shape)} does not fit {spec.as_written()} on {mesh!r}: " + "; ".join(problems))


# --- Trees ---


def shard(tree: T, specs: SpecTree, mesh: Mesh, rank: int, *, pad: bool = False) -> T:
    """Return one rank's shards of a tree of full tensors. They are views where possible.

    >>> shard({"w": torch.arange(4)}, {"w": P("data")}, Mesh(data=2), rank=1)
    {'w': tensor([2, 3])}

    Args:
        tree: any pytree. Leaves that are not tensors are returned unchanged.
        specs: a pytree prefix of specs.
        mesh: the mesh.
        rank: the rank.
        pad: pad uneven dims with zeros at the end.

    Raises:
        SpecError: when a leaf does not fit, for example because a dim is not divisible and `pad` is False. The message
            lists every such leaf.
    """
    full = broadcast_specs(specs, tree)
    fitting = optree.tree_map(lambda leaf, spec: spec if isinstance(leaf, torch.Tensor) else P(), tree, full)
    validate(tree, fitting, mesh, pad=pad, advice="or pad storage layouts, with shard(…, pad=True)")

    def one(leaf: Tree, spec: P) -> Tree:
        return shard_leaf(leaf, spec, mesh, rank, pad=pad) if isinstance(leaf, torch.Tensor) else leaf

    shards: T = optree.tree_map(one, tree, full)
    return shards


def unshard(trees: Sequence[T], specs: SpecTree, mesh: Mesh, *, shapes: Tree = None, check: bool = False) -> T:
    """Return the full tensors, given every rank's shards.

    >>> unshard([{"w": torch.tensor([0, 1])}, {"w": torch.tensor([2, 3])}], P("data"), Mesh(data=2))
    {'w': tensor([0, 1, 2, 3])}

    Args:
        trees: one tree per rank, in rank order.
        specs: a pytree prefix of specs.
        mesh: the mesh.
        shapes: a tree of global shapes (or tensors with these shapes), to remove padding.
        check: verify that replicas are equal, bit for bit.

    Raises:
        SpecError: when there is not one tree per rank, or a spec has more dims than its tensors. With `check`, also
            when replicas differ; the message lists the leaves and ranks.
    """
    if len(trees) != mesh.size:
        raise SpecError(f"unshard takes one tree per rank: {mesh!r} has {mesh.size} ranks, got {len(trees)} trees")
    require_dims(trees[0], specs)
    full = optree.tree_leaves(broadcast_specs(specs, trees[0]))
    columns = [optree.tree_leaves(tree) for tree in trees]
    paths, structure = tree_paths(trees[0]), optree.tree_structure(trees[0])
    wanted = optree.tree_leaves(shapes, is_leaf=_is_shape) if shapes is not None else [None] * len(paths)
    results, differing = [], []
    for index, (path, spec) in enumerate(zip(paths, full, strict=True)):
        parts = [column[index] for column in columns]
        if not isinstance(parts[0], torch.Tensor):
            results.append(parts[0])
            continue
        if check:
            differing += _differing(path, parts, spec, mesh)
        shape = wanted[index]
        if shape is not None:
            shape = shape.shape if isinstance(shape, torch.Tensor) else shape
            spec = spec.fitted(shape, mesh)
        results.append(unshard_leaf(parts, spec, mesh))
    if differing:
        raise SpecError("replicas differ:\n" + "\n".join(differing))
    whole_tree: T = optree.tree_unflatten(structure, results)
    return whole_tree


def reshard(
    trees: Sequence[T], from_specs: SpecTree, from_mesh: Mesh, to_specs: SpecTree, to_mesh: Mesh, *, shapes: Tree = None
) -> list[T]:
    """Convert every rank's shards from one layout to another, which may be on another mesh.

    >>> parts = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    >>> reshard(parts, P("data"), Mesh(data=2), P("data"), Mesh(data=4))
    [tensor([0]), tensor([1]), tensor([2]), tensor([3])]

    Args:
        trees: one tree per rank of `from_mesh`, in rank order.
        from_specs, from_mesh: current layout.
        to_specs, to_mesh: new layout.
        shapes: a tree of global shapes, required for padded dims. Old padding is removed; new padding is zeros.

    Returns:
        One tree per rank of `to_mesh`.
    """
    whole = unshard(trees, from_specs, from_mesh, shapes=shapes)
    return [shard(whole, to_specs, to_mesh, rank, pad=shapes is not None) for rank in to_mesh.ranks]


# --- Leaves ---


def shard_leaf(x: torch.Tensor, spec: P, mesh: Mesh, rank: int, *, pad: bool = False) -> torch.Tensor:
    """Return one rank's shard of a full tensor. For partial sums, rank 0 of a group gets the value, the others zeros.

    A rank that is not the owner gets a tensor on the meta device, which has the shape and no memory.

    >>> shard_leaf(torch.arange(4), P("data"), Mesh(data=2), rank=1)
    tensor([2, 3])

    Args:
        x: the full tensor.
        spec: spec of the result.
        mesh, rank, pad: as for `shard`.

    Raises:
        SpecError: when the tensor does not fit the spec.
    """
    _check(x.shape, spec, mesh, pad=pad)
    spec = spec.fitted(x.shape, mesh) if pad else spec
    coordinates = mesh.coordinates(rank)
    if any(coordinates[axis] != owner for axis, owner in spec.owner.items()):
        x = x.to("meta")
    for dim in spec.padded:
        for axis in spec.dim_axes()[dim]:
            length = -(-x.shape[dim] // mesh.axis_size(axis))
            x = _filled(x, dim, length * mesh.axis_size(axis)).narrow(dim, coordinates[axis] * length, length)
    for axis, dim, outer in sorted(spec.placements(mesh), key=lambda placement: -units(placement.outer)):
        size = mesh.axis_size(axis)
        if dim in spec.padded:
            continue
        if outer == 1:
            length = x.shape[dim] // size
            x = x.narrow(dim, coordinates[axis] * length, length)
        elif isinstance(outer, int):
            x = x.unflatten(dim, (outer, size, -1)).select(dim + 1, coordinates[axis]).flatten(dim, dim + 1)
        else:
            x = by_rank(x, dim, outer, size).unflatten(dim, (size, -1)).select(dim, coordinates[axis])
    if any(coordinates[axis] for axis in spec.unreduced):  # partial sums: one rank has the value
        x = torch.zeros_like(x)
    return spec.store(x)


def unshard_leaf(parts: Sequence[torch.Tensor], spec: P, mesh: Mesh) -> torch.Tensor:
    """Return the full tensor, given every rank's shard. Partial sums are summed in rank order.

    >>> unshard_leaf([torch.tensor([0, 1]), torch.tensor([2, 3])], P(unreduced={"data"}), Mesh(data=2))
    tensor([2, 4])

    Args:
        parts: shards, one tensor per rank, in rank order.
        spec: spec of the tensor.
        mesh: the mesh.

    Raises:
        SpecError: when the spec has more dims than the tensors.
    """
    require_dims(parts[0], spec)
    values = {rank: spec.fetch(part) for rank, part in enumerate(parts)}
    if spec.owner:
        values = {rank: values[mesh.rank({**mesh.coordinates(rank), **spec.owner})] for rank in mesh.ranks}
    for axis in sorted(spec.unreduced):
        for group in mesh.groups(axis):
            total = values[group[0]]
            for rank in group[1:]:
                total = total + values[rank]
            values.update(dict.fromkeys(group, total))
    for axis, dim, outer, length in gathers(spec, mesh):
        joined = {}
        for group in mesh.groups(axis):
            if group[0] in values:
                whole = _joined([values[rank] for rank in group], dim, outer)
                joined[group[0]] = whole if length is None else whole.narrow(dim, 0, length)
        values = {rank: joined[mesh.rank({**mesh.coordinates(rank), axis: 0})] for rank in joined}
    return values[0]


def gathers(spec: P, mesh: Mesh) -> Iterator[tuple[str, int, Blocks, int | None]]:
    """Yield (axis, dim, blocks outside, length without padding) of the gathers that make a shard a full tensor."""
    for axis, dim, outer in sorted(spec.placements(mesh), key=lambda placement: units(placement.outer)):
        if dim not in spec.padded:
            yield axis, dim, outer, None
    for dim in spec.padded:  # the innermost axis first: its padding is at the end of what it splits
        for axis, length in reversed(spec.blocks(dim, mesh).items()):
            yield axis, dim, 1, length


def _joined(parts: list[torch.Tensor], dim: int, outer: Blocks) -> torch.Tensor:
    if outer == 1:
        return torch.cat(parts, dim)
    if isinstance(outer, tuple):
        return by_block(torch.cat(parts, dim), dim, outer, len(parts))
    return torch.stack([part.unflatten(dim, (outer, -1)) for part in parts], dim + 1).flatten(dim, dim + 2)


def _filled(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def _is_shape(x: Tree) -> bool:
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)


def _differing(path: str, parts: list[torch.Tensor], spec: P, mesh: Mesh) -> list[str]:
    split = spec.axes | spec.unreduced | spec.owner.keys()
    copies = [name for name in mesh.axis_names if name not in split]
    lines = []
    for group in mesh.groups(copies) if copies else []:
        other = [rank for rank in group if not _same_bits(parts[rank], parts[group[0]])]
        if other:
            where = f"  {path or 'the value'}: {spec!r} on {mesh!r}"
            lines.append(f"{where}: ranks {other} hold other values than rank {group[0]}")
    return lines


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b)))
