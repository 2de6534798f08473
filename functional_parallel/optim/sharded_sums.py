"""Sums over full parameters in updates that work on shards."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from sharding_specs import P

from ..collectives import current_axes, psum
from ..functions import SpecTree

__all__ = ["known_specs", "sum_over_shards"]


def known_specs(optimizer: str, needs: str, specs: SpecTree) -> SpecTree:
    """Return the specs that an update was given. Without specs, parameters are full; shards may have any layout."""
    if specs is None and current_axes():
        raise ValueError(
            f"{optimizer} was given shards (inside a mapped function, over {', '.join(current_axes())}) without specs; "
            f"{needs} to know which axes split which dim. Write optimizer.update(grads, state, "
            "params, specs) with the specs of the parameters, P() if they are whole, or use an elementwise optimizer: "
            "adamw, lion"
        )
    return P() if specs is None else specs


def sum_over_shards(total: Tensor, axes: Collection[str]) -> Tensor:
    """Return the sum of a rank's total over all shards along some axes, in their order."""
    return psum(total, tuple(axes)) if axes else total
