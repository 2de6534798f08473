"""Requests of transforms, each a frozen object. Lowering and training serve them, and do not know the transforms."""

from .buffers import Buffers, BufferState
from .data_axis import DataAxis, Master, Microbatches, Replicas, ReplicaState, owners_of
from .error_feedback import ErrorFeedback
from .loss_scaling import LossScale, LossScaleState, ScaledState, ScaleLoss
from .offloaded_state import OffloadedState
from .order import Order
from .run_pass import RunPass, requested_passes
from .state_request import (
    StateRequest,
    Update,
    UpdateLayouts,
    converted_state,
    loss_arguments,
    split_state,
    state_requests,
    with_leaves,
)
from .stored_type import Masters, MasterState, StoredType
from .update_sharding import SummedApart, UpdateSharding, flat_update
