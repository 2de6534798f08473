"""Optimizer's update of shards: its layouts, the check that it is elementwise, and the flat vector."""

from .elementwise import require_elementwise
from .flat import FlatPacking, require_declared
from .replicated_state import warn_of_replicated_state
from .returned import require_same_structure
from .step_layout import StepLayout, find_step_layout
from .update_layout import (
    as_trained,
    global_norm,
)
