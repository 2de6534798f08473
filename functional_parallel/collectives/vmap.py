"""vmap over a mesh axis: all ranks run in one process, as one batch.

A collective over the axis becomes arithmetic along a vmap level, so it composes with grad, jvp and other vmaps, and is
the oracle for the tests of all other implementations. A value that is mapped at the level is Varying; an unmapped one
is Invariant. Casts are not inserted: if a gradient is taken *inside*, as in `vmap(grad(f))`, an Invariant parameter
that is combined with Varying data needs `fp.pvary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import Any

import optree
import torch
from torch import Tensor

from sharding_specs import register_dataclasses

from ..errors import CollectiveTypeError
from .axes import bind
from .communicator import Lane

Dims = int | Sequence["Dims"] | Mapping[str, "Dims"] | None  # one dim for all leaves of a tree, or a tree of dims


def vmap(
    fn: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    axis_name: str | None = None,
    axis_size: int | None = None,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Map a function over a dim of its arguments. Collectives inside can use this dim as the mesh axis `axis_name`.

    The other arguments are as in torch.func.vmap. An out_dim of None declares that the result is equal for all
    entries, which is checked. `axis_size` is required if no argument is mapped. `chunk_size` is not allowed with
    `axis_name`, because all ranks of an axis must run together.

    >>> from functional_parallel.collectives import psum
    >>> vmap(lambda x: x / psum(x, "i"), axis_name="i")(torch.tensor([1.0, 1.0, 2.0]))
    tensor([0.2500, 0.2500, 0.5000])
    """
    plain = None
    if axis_name is None and axis_size is None:
        plain = torch.func.vmap(fn, in_dims, out_dims, randomness=randomness, chunk_size=chunk_size)
    elif chunk_size is not None:
        raise ValueError(f"vmap over {axis_name!r} in chunks: all ranks of an axis must meet; leave chunk_size out")

    @wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        register_dataclasses(args)
        if plain is not None and not _holds_dataclasses(args):
            return plain(*args, **kwargs)
        if chunk_size is not None:
            raise ValueError(
                "vmap over dataclasses in chunks: torch.func.vmap does not know them; leave chunk_size out"
            )
        leaves, structure = optree.tree_flatten(args)
        dims = dims_of_leaves(in_dims, args)
        size = _checked_size(axis_name, axis_size, leaves, dims)
        results = _Results(axis_name, out_dims)

        def with_lane(index: Tensor, *inner: Any) -> list[Tensor]:
            lane = Lane(axis_name or "", index)
            with bind({} if axis_name is None else {axis_name: size}, lane):
                return results.keep(fn(*optree.tree_unflatten(structure, inner), **kwargs), lane)

        stacked = torch.func.vmap(with_lane, (0, *dims), randomness=randomness)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        return results.join(stacked(torch.arange(size, device=device), *leaves))

    return mapped


@dataclass
class _Results:
    """Results of the mapped function. Results that all entries share bypass torch's vmap."""

    # torch rejects out_dims=None for a result that an outer level maps, even if the result is unmapped at this level.

    axis_name: str | None
    out_dims: Dims

    def keep(self, outputs: Any, lane: Lane) -> list[Tensor]:
        register_dataclasses(outputs)
        self.leaves, self.structure = optree.tree_flatten(outputs, none_is_leaf=True)
        dims = _broadcast(self.out_dims, outputs)
        self.dims = [dim if isinstance(leaf, Tensor) else None for leaf, dim in zip(self.leaves, dims, strict=True)]
        paths = optree.treespec_paths(self.structure)
        for leaf, dim, path in zip(self.leaves, self.dims, paths, strict=True):
            if dim is None and isinstance(leaf, Tensor) and is_mapped(leaf, lane):
                where = "/".join(map(str, path)) or "the result"
                raise CollectiveTypeError(
                    f"vmap over axis {self.axis_name!r}: {where} is Varying, but out_dims=None says that it is the "
                    "same for all entries; reduce it (fp.psum, fp.pmean), or give it an out_dim"
                )
        # Return the index too, so that torch's vmap has a result even if no result of the function is mapped.
        return [lane.index, *(leaf for leaf, dim in zip(self.leaves, self.dims, strict=True) if dim is not None)]

    def join(self, stacked: list[Tensor]) -> Any:
        mapped = iter(stacked[1:])
        leaves = [
            leaf if dim is None else next(mapped).movedim(0, dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return optree.tree_unflatten(self.structure, leaves)


def is_mapped(x: Tensor, lane: Lane) -> bool:
    functorch = torch._C._functorch
    level = functorch.maybe_get_level(lane.index)
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == level:
            return True
        x = functorch.get_unwrapped(x)
    return False


def _holds_dataclasses(args: tuple[Any, ...]) -> bool:
    """Whether some node is a dataclass. torch's pytrees do not support dataclasses."""
    return any(map(is_dataclass, optree.tree_leaves(args, is_leaf=is_dataclass)))


def dims_of_leaves(in_dims: Dims, args: tuple[Any, ...]) -> list[int | None]:
    if isinstance(in_dims, list):
        in_dims = tuple(in_dims)
    if isinstance(in_dims, tuple) and len(in_dims) != len(args):
        raise ValueError(f"vmap: in_dims {in_dims} names {len(in_dims)} arguments, but there are {len(args)}")
    leaves = zip(optree.tree_leaves(args, none_is_leaf=True), _broadcast(in_dims, args), strict=True)
    return [dim if isinstance(leaf, Tensor) else None for leaf, dim in leaves if leaf is not None]


def _checked_size(axis_name: str | None, given: int | None, leaves: Sequence[Any], dims: Sequence[int | None]) -> int:
    sizes: list[int] = [leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
    if given is not None:
        sizes.append(given)
    if not sizes:
        raise ValueError(f"vmap over {axis_name!r}: no argument is mapped, so its size is not known; give axis_size=")
    if any(size != sizes[0] for size in sizes):
        raise ValueError(f"vmap over {axis_name!r}: the mapped dims (and axis_size) must agree, but are {sizes}")
    return sizes[0]


def _broadcast(dims: Dims, tree: Any) -> list[int | None]:
    full = optree.tree_broadcast_prefix(dims, tree, none_is_leaf=True)
    leaves: list[int | None] = optree.tree_leaves(full, none_is_leaf=True)
    return leaves
