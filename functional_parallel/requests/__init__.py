"""Requests of transforms, each a frozen object, and their order.

A request shards the update (`update_sharding`), adds leaves to the state (`state_request`), contributes
passes (`run_pass`), or describes the ranks of an axis (`axes`). Lowering and training serve these kinds of requests and
do not know the transforms that make them.
"""

from .axes import DataAxis, Master, Microbatches, Replicas, ReplicaState, owners_of
from .buffers import Buffers, BufferState
from .loss_scaling import LossScale, LossScaleState, ScaledState, ScaleLoss
from .order import Order
from .run_pass import RunPass, requested_passes
from .state_request import (
    StateRequest,
    Update,
    converted_state,
    loss_arguments,
    split_state,
    state_requests,
    with_leaves,
)
from .stored_type import Masters, MasterState, StoredType
from .update_sharding import SummedApart, UpdateSharding, flat_update
