"""Typed collectives: functions of values. Their forward determines their backward. See README.md in this folder."""

from . import guards, ops, reference, slots
from .api import all_gather, all_to_all, pbroadcast, pmax, pmean, pmin, ppermute, pscatter, psum, psum_scatter
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
    normalize_axes,
    snapshot,
    trace_only,
)
from .casts import axis_index, pcast, pvary
from .communicator import Communicator, Lane
from .dim_split import DimSplit
from .grad_mode import called_with_gradients, called_without_gradients, keeping_grad_mode
from .guards import check_callable, check_op, guard
from .ops import primitive_of
from .primitives import apply_primitive
from .slots import AHEAD, ALIGNMENT, GATHERED, HALF, LARGEST, ROOM, SMALL_HALF, aligned, places, slot_bytes
from .torch_names import broadcast, gather, recv, reduce, scatter, send
from .types import State, Type, dual, result_type, source_state
from .vmap import dims_of_leaves, is_mapped, vmap

__all__ = [
    "AHEAD",
    "ALIGNMENT",
    "GATHERED",
    "HALF",
    "LARGEST",
    "MICROBATCH",
    "ROOM",
    "SMALL_HALF",
    "Axes",
    "Communicator",
    "DimSplit",
    "Lane",
    "State",
    "Type",
    "aligned",
    "all_gather",
    "all_to_all",
    "apply_primitive",
    "are_bound",
    "axis_dim_split",
    "axis_index",
    "axis_size",
    "bind",
    "broadcast",
    "called_with_gradients",
    "called_without_gradients",
    "check_callable",
    "check_op",
    "current_axes",
    "dims_of_leaves",
    "dual",
    "gather",
    "guard",
    "guards",
    "hidden_axes",
    "hide",
    "is_mapped",
    "keeping_grad_mode",
    "mesh_axis_size",
    "normalize_axes",
    "ops",
    "pbroadcast",
    "pcast",
    "places",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "primitive_of",
    "pscatter",
    "psum",
    "psum_scatter",
    "pvary",
    "recv",
    "reduce",
    "reference",
    "result_type",
    "scatter",
    "send",
    "slot_bytes",
    "slots",
    "snapshot",
    "source_state",
    "trace_only",
    "vmap",
]
