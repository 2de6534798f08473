"""Sums over full parameters in updates that work on shards."""

from __future__ import annotations

from collections.abc import Collection

import optree
from torch import Tensor

from sharding_specs import P, broadcast_specs

from ..collectives import current_axes, psum
from ..functions import PyTree, SpecTree


def decays_and_specs(optimizer: str, needs: str, decays: PyTree, specs: SpecTree, params: PyTree) -> PyTree:
    if specs is None and current_axes():
        raise ValueError(
            f"{optimizer} was given shards over {', '.join(current_axes())} without specs; {needs} to know which axes "
            "split which dim. Write optimizer.update(grads, state, params, specs), or use adamw, which is elementwise"
        )
    return optree.tree_map(lambda *pair: pair, decays, broadcast_specs(P() if specs is None else specs, params))


def sum_over_shards(total: Tensor, axes: Collection[str]) -> Tensor:
    return psum(total, tuple(axes)) if axes else total


def whole_along(spec: P, dim: int) -> P:
    """Return a spec without the axes that split a dim."""
    dims = [() if index == dim else factors for index, factors in enumerate(spec.dims)]
    return spec.replace(dims, padded={index: size for index, size in spec.padded.items() if index != dim})
