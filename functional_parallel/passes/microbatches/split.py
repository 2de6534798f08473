"""Split the batch of a step into microbatches: equal ones, or unequal ones if their number does not divide it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, SpecError, broadcast_specs, local_shape, tree_paths, validate

from ...collectives import DimSplit
from ...ir import Aval
from ...ops import device_of_memory
from .unroll import microbatch_dim, with_dim_size


def microbatch_splits(
    args: tuple[Any, ...], specs: tuple[Any, ...], mesh: Mesh, virtual: Mapping[str, int]
) -> dict[str, DimSplit]:
    """Check that the arguments fit their specs, and return the split of each microbatch axis.

    Arguments of several lengths are split in proportion: if 5 samples are split into 2, 2 and 1, then 10 into 4, 4 and
    2. `virtual` has the microbatch axes, each with the number of microbatches.
    """
    found = {axis: DimSplit.of(count, _samples(args, specs, mesh, axis, count)) for axis, count in virtual.items()}
    uneven = [axis for axis, parts in found.items() if not parts.is_even]
    advice = (
        "fp.pad_batch(batch, rows) fills up a batch and says what counts; fp.zero(3, …) pads parameters by itself; an "
        "argument that is no batch has a layout of its own, as in fp.zero(3, …, batch=(P(), P('data')))"
    )
    validate(args, optree.tree_map(lambda spec: spec.without(uneven), specs), mesh, advice=advice)
    return found


def shard_aval(leaf: torch.Tensor, spec: P, mesh: Mesh, parts: Mapping[str, DimSplit]) -> Aval:
    uneven = [axis for axis, each in parts.items() if not each.is_even and axis in spec.axes]
    # A tensor on the meta device represents one on another device. The choice of kernels for meta tensors does not
    # matter here: attention would be decomposed.
    device = torch.get_default_device() if leaf.is_meta else leaf.device
    shape = tuple(local_shape(tuple(leaf.shape), spec.without(uneven), mesh))
    aval = Aval(shape, leaf.dtype, device_of_memory(spec.memory, device))
    for axis in uneven:
        dim = microbatch_dim(spec, axis, "an argument")
        aval = with_dim_size(aval, dim, parts[axis].local(aval.shape[dim]))
    return aval


def _samples(args: tuple[Any, ...], specs: tuple[Any, ...], mesh: Mesh, axis: str, count: int) -> int | None:
    """Number of samples of a batch that is split into unequal microbatches; None if all microbatches are equal."""
    lengths = _lengths(args, specs, mesh, axis)
    if all(length % count == 0 for length in lengths.values()):
        return None
    samples = math.gcd(*lengths.values())
    if samples < count:
        raise SpecError(_too_few(lengths, count, samples))
    return samples


def _lengths(args: tuple[Any, ...], specs: tuple[Any, ...], mesh: Mesh, axis: str) -> dict[str, int]:
    """Return, by path, the per-rank length of each dim that the axis splits; empty if the specs have another error."""
    found = {}
    full = optree.tree_leaves(broadcast_specs(specs, args))
    for path, leaf, spec in zip(tree_paths(args), optree.tree_leaves(args), full, strict=True):
        if not isinstance(leaf, torch.Tensor) or axis not in spec.axes:
            continue
        dim = next(dim for dim, axes in enumerate(spec.dim_axes()) if axis in axes)
        others = [name for name in spec.dim_axes()[dim] if name != axis]
        if dim >= leaf.ndim or len(others) + 1 < len(spec.dims[dim]):
            return {}
        length, rest = divmod(leaf.shape[dim], math.prod(mesh.axis_size(name) for name in others))
        if rest:
            return {}
        found[path] = length
    return found


def _too_few(lengths: Mapping[str, int], count: int, samples: int) -> str:
    listed = ", ".join(f"{path}: {length}" for path, length in lengths.items())
    if len(set(lengths.values())) == 1:
        return (
            f"a batch of {samples} on each rank cannot be cut into {count} microbatches: take {samples} or "
            f"fewer, or give each rank {count} or more ({listed})"
        )
    return (
        f"arguments of several lengths cannot be cut alike into {count} microbatches ({listed} on each rank): their "
        f"lengths have {samples} equal pieces in common; take {samples} microbatches or fewer, give lengths that "
        f"{count} divides, or say with batch= what is not to be cut"
    )
