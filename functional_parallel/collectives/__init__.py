"""Typed collectives: functions of values whose forward decides their backward. See README.md in this folder."""

from . import group, ops
from .api import (
    all_gather,
    all_to_all,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from .axes import (
    UnboundAxisError,
    axis_size,
    bind,
    current_axes,
    hide,
    mesh_axis_size,
    normalize_axes,
    staging,
)
from .carrier import Carrier
from .casts import axis_index, pcast, pvary
from .guards import ForeignCollectiveError, check_callable, check_op, guard
from .primitives import emit
from .primitives.extremes import NotDifferentiableError
from .shapes import CollectiveShapeError
from .types import CollectiveTypeError, State, Type, dual, result_type, source_state
from .vmap import vmap
from .vocabulary import broadcast, gather, recv, reduce, scatter, send

__all__ = [
    "Carrier",
    "CollectiveShapeError",
    "CollectiveTypeError",
    "ForeignCollectiveError",
    "NotDifferentiableError",
    "State",
    "Type",
    "UnboundAxisError",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "bind",
    "broadcast",
    "check_callable",
    "check_op",
    "current_axes",
    "dual",
    "emit",
    "gather",
    "group",
    "guard",
    "hide",
    "mesh_axis_size",
    "normalize_axes",
    "ops",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pscatter",
    "psum",
    "psum_scatter",
    "pvary",
    "recv",
    "reduce",
    "result_type",
    "scatter",
    "send",
    "source_state",
    "staging",
    "vmap",
]
