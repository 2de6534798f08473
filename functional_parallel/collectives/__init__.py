"""Typed collectives: functions of values. Their forward determines their backward. See README.md in this folder."""

from . import library_ops, reference  # library_ops first: the primitives call them
from .api import (
    all_gather,
    all_to_all,
    axis_index,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
    pvary,
)
from .axes import (
    MICROBATCH,
    Axes,
    are_bound,
    axis_dim_split,
    axis_size,
    bind,
    current_axes,
    hidden_axes,
    hide,
    mesh_axis_size,
    restored,
    snapshot,
    trace_only,
    unhide,
)
from .call import COMMUNICATING, OWNED, STARTED, CollectiveCall, call_of
from .communicator import Communicator, Lane
from .dim_split import DimSplit
from .guards import check_callable, check_op
from .library_ops import fake_kernel, primitive_of
from .primitives import apply_primitive, gradients_at_call, keeping_grad_mode
from .torch_names import broadcast, gather, recv, reduce, scatter, send
from .types import HOLDING, State, Type, dual, result_type
from .vmap import dims_of_leaves, is_mapped, vmap
