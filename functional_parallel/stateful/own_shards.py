"""Shards of a tree that this process holds, for writes that need no program: each rank works on its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import rank_boxes

from ..runtime import device_of
from .held import tensors
from .sharded import Sharded, filled


class OwnShard(NamedTuple):
    """Shard of a leaf on ranks that share its memory. `rows` are the places of its first dim in the full tensor."""

    leaf: int
    ranks: list[int]
    shard: torch.Tensor
    rows: range


def own_shards(tree: Sharded) -> Iterator[OwnShard]:
    """Iterate over the shards of this process, each once."""
    runtime = tree.runtime()
    rows = zip(tree.handles, optree.tree_leaves(tree.specs), optree.tree_leaves(tree.shapes), strict=True)
    for leaf, (handle, spec, full) in enumerate(rows):
        found = dict[int, OwnShard]()  # by address
        for rank in runtime.own_ranks:
            at = tree.mesh.coordinates(rank)
            if all(at[axis] in indices for axis, indices in runtime.where(handle)):
                shard = runtime.shard_of(handle, spec, rank)
                start = next(rank_boxes(full.shape, spec, tree.mesh, at))[0].start[:1] or (0,)
                own = range(start[0], start[0] + shard.shape[0]) if shard.ndim else range(0)
                found.setdefault(shard.data_ptr(), OwnShard(leaf, [], shard, own)).ranks.append(rank)
        yield from found.values()


def with_rows(tree: Sharded, rows: int) -> Sharded:
    """Return zeros in the layout of a tree, with this number of rows. Leaves without dims stay scalars."""
    where = [tree.runtime().where(handle) for handle in tree.handles]
    shapes = optree.tree_map(lambda x: x.new_empty(rows, *x.shape[1:]) if x.ndim else x, tree.shapes)

    def fill(_: object, shards: dict[tuple[int, int], torch.Tensor]) -> None:
        for shard in shards.values():
            shard.zero_()

    device = device_of(tree.handles) or torch.get_default_device()
    return filled(shapes, tree.specs, tree.runtime, device, fill, where.__getitem__)


def brought(tree: Sharded, program: Any, weights: Sharded) -> Sharded:
    """Return the tree on the ranks that hold it in a program of weights and the tree. Every process must call it."""
    handles = tree.runtime().brought(program, [*tensors(weights.handles), *tree.handles])
    return tree.replaced(handles[-len(tree.handles) :])
