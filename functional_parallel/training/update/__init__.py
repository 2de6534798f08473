"""Optimizer's update of shards: its layouts, the check that it is elementwise, and the flat vector."""

from .flat import require_elementwise
from .replicated_state import warn_of_replicated_state
from .returned import require_same_structure
from .scaled import ScaledState, scaled_loss, select_unless, unscaled, with_scale
from .step_layout import StepLayout, find_step_layout
from .update_layout import (
    at_rest,
    gather_updated,
    global_norm,
    into_compute,
    likes,
    reduce_gradient,
    shard_for_update,
    tree_map_params,
)

__all__ = [
    "ScaledState",
    "StepLayout",
    "at_rest",
    "find_step_layout",
    "gather_updated",
    "global_norm",
    "into_compute",
    "likes",
    "reduce_gradient",
    "require_elementwise",
    "require_same_structure",
    "scaled_loss",
    "select_unless",
    "shard_for_update",
    "tree_map_params",
    "unscaled",
    "warn_of_replicated_state",
    "with_scale",
]
