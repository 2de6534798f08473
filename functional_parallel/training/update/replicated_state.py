"""Warning about an optimizer state that a plan cannot shard, because its leaves do not name their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch

from sharding_specs import P, tree_paths

from ...errors import PartitionWarning
from ...functions import PyTree, SpecTree
from ...ir import current_source, warn_at
from ...optim import Optimizer
from ...requests import StateRequest, split_state
from .step_layout import StepLayout

_LISTED = 4


def warn_of_replicated_state(
    state: PyTree, specs: SpecTree, layouts: StepLayout, optimizer: Optimizer, requests: Sequence[StateRequest]
) -> None:
    """Warn of replicated leaves of a packed state that have the shapes of sharded parameters, as moments have."""
    if getattr(optimizer, "specs", None) is not None:  # it declares itself which leaves are replicated
        return
    (state, _), (specs, _) = (split_state(each, requests) for each in (state, specs))
    axes = _axes_by_shape(layouts)
    rows = zip(tree_paths(state), optree.tree_leaves(state), optree.tree_leaves(specs), strict=True)
    found = {path: leaf for path, leaf, spec in rows if not spec.axes and getattr(leaf, "shape", None) in axes}
    if not found:
        return
    size = sum(leaf.nbytes for leaf in found.values())
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    over = ", ".join(map(repr, sorted({axis for leaf in found.values() for axis in axes[leaf.shape]})))
    warn_at(
        current_source(),
        f"train_step: ZeRO has no effect on this optimizer's state: every rank along {over} holds all "
        f"{size:,} bytes of {', '.join([*found][:_LISTED])}{more}. A state is sharded like the parameters only in "
        "subtrees with the structure of all parameters; here these tensors have their shapes, but are in subtrees of "
        "another structure, so it is not known which parameters they belong to. Give the optimizer `specs=`, a "
        "function from (params, their specs) to specs of the state (its update is then given shards), or keep each "
        "moment in a tree with the structure of all parameters",
        PartitionWarning,
    )


def _axes_by_shape(layouts: StepLayout) -> dict[torch.Size, frozenset[str]]:
    """Return the shape of every parameter that the update splits, with the axes that split it."""
    found: dict[torch.Size, frozenset[str]] = {}
    specs: list[P] = optree.tree_leaves(layouts.update)
    for leaf, spec in zip(optree.tree_leaves(layouts.packing.like), specs, strict=True):
        if spec.axes and isinstance(leaf, torch.Tensor):
            found[leaf.shape] = found.get(leaf.shape, frozenset()) | spec.axes
    return found
