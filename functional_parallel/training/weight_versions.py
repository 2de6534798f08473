"""Training steps with an asynchronous pipeline schedule, which updates weights while microbatches are in flight."""

from __future__ import annotations

from typing import TypeVar

import optree
import torch

from sharding_specs import Mesh, P

from ..collectives import MICROBATCH
from ..functions import Applied, PyTree, SpecTree
from ..pipelines import pipeline_of, updates_of

T = TypeVar("T")


def is_asynchronous(applied: Applied, mesh: Mesh) -> bool:
    """Whether the plan updates weights while microbatches are in flight."""
    pipeline = pipeline_of(applied)
    return pipeline is not None and pipeline.on(mesh).versions is not None


def of_one_update(applied: Applied, mesh: Mesh, batch: tuple[PyTree, ...], specs: SpecTree) -> tuple[PyTree, ...]:
    """Return the slice of a batch for one update. It is the full batch unless the pipeline is asynchronous."""
    pipeline = pipeline_of(applied)
    if pipeline is None or not is_asynchronous(applied, mesh):
        return batch
    updates = updates_of(pipeline.on(mesh))

    def part(leaf: T, spec: P) -> T | torch.Tensor:
        dims = [dim for dim, axes in enumerate(spec.dim_axes()) if MICROBATCH in axes]
        if not isinstance(leaf, torch.Tensor) or not dims:
            return leaf
        extent = leaf.shape[dims[0]]
        length, rest = divmod(extent, updates)
        if rest:
            fitting = " or ".join(str(updates * count) for count in (length, length + 1) if count)
            raise ValueError(
                f"a batch of {extent} samples cannot be cut for the {updates} updates of this pipeline: give "
                f"{fitting} samples, or another number of microbatches"
            )
        return leaf.narrow(dims[0], 0, length)

    found: tuple[PyTree, ...] = optree.tree_map(part, batch, specs)
    return found
