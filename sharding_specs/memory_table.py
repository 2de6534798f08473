"""Bytes per rank, computed from shapes and specs only."""

from __future__ import annotations

import math
from typing import NamedTuple

import optree

from .layout import local_shape
from .mesh import Mesh
from .pytree import SpecTree, Tree
from .spec import P
from .trees import broadcast_specs, tree_paths
from .validate import require_dims


class MemoryRow(NamedTuple):
    """Path, global shape and spec of one leaf, and the bytes of its shard on each rank."""

    path: str
    shape: tuple[int, ...]
    spec: P
    bytes: int


def memory_table(tree: Tree, specs: SpecTree, mesh: Mesh) -> list[MemoryRow]:
    """Return the size of a rank's shard of every leaf. Uneven dims count as padded, and a leaf of one rank as there.

    >>> import torch
    >>> from sharding_specs import P
    >>> memory_table({"w": torch.empty(8, 4, device="meta")}, P("data"), Mesh(data=4))
    [MemoryRow(path='w', shape=(8, 4), spec=P('data'), bytes=32)]

    Args:
        tree: tensors on any device, meta included. Other leaves are skipped.
        specs: a pytree prefix of specs.
        mesh: the mesh.
    """
    require_dims(tree, specs)
    full = optree.tree_leaves(broadcast_specs(specs, tree))
    rows = []
    for path, leaf, spec in zip(tree_paths(tree), optree.tree_leaves(tree), full, strict=True):
        if not hasattr(leaf, "shape"):  # a number or a name, with negligible memory
            continue
        shape = local_shape(leaf.shape, spec.fitted(leaf.shape, mesh), mesh)
        rows.append(MemoryRow(path, tuple(leaf.shape), spec, math.prod(shape) * leaf.dtype.itemsize))
    return rows


def bytes_per_rank(tree: Tree, specs: SpecTree, mesh: Mesh) -> int:
    """Return the bytes of a tree's shards on each rank.

    >>> import torch
    >>> from sharding_specs import P
    >>> bytes_per_rank([torch.empty(8, 4)], P("data"), Mesh(data=4))
    32

    Args:
        tree, specs, mesh: as for `memory_table`.
    """
    return sum(row.bytes for row in memory_table(tree, specs, mesh))
