"""Requests of transforms, each a frozen object in its own file, and the table of their order.

A request places the update or the norm (`update_sharding`), adds leaves to the state (`state_request`), contributes
passes (`run_pass`), or adds a virtual axis (`microbatches`). Lowering and training serve these kinds of requests and do
not know the transforms that make them.
"""

from .data_axis import DataAxis
from .loss_scaling import LossScale, LossScaleState
from .master import Master, owners_of
from .microbatches import Microbatches
from .replicas import Replicas, ReplicaState
from .run_pass import PairPass, RunPass, Scope, requested_passes
from .scale_loss import ScaledState, ScaleLoss
from .state_request import StateRequest, Update, converted_state, split_state, state_requests, with_leaves
from .stored_type import Masters, StoredType
from .summed_apart import SummedApart
from .table import REQUESTS, Order, require_order
from .update_sharding import NormSharding, UpdateSharding, divided_specs, flat_update, update_specs

__all__ = [
    "REQUESTS",
    "DataAxis",
    "LossScale",
    "LossScaleState",
    "Master",
    "Masters",
    "Microbatches",
    "NormSharding",
    "Order",
    "PairPass",
    "ReplicaState",
    "Replicas",
    "RunPass",
    "ScaleLoss",
    "ScaledState",
    "Scope",
    "StateRequest",
    "StoredType",
    "SummedApart",
    "Update",
    "UpdateSharding",
    "converted_state",
    "divided_specs",
    "flat_update",
    "owners_of",
    "requested_passes",
    "require_order",
    "split_state",
    "state_requests",
    "update_specs",
    "with_leaves",
]
