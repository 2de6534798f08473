"""Functions on shards: layouts, positional arguments, grad, vmap, jvp and hessian, modules as functions."""

from .batch_groups import BatchSplit
from .buffer_tree import BufferTree
from .dependencies import require_no_gradient_hooks
from .derivatives import grad, grad_and_value, hessian, jvp, unused, vmap
from .foreign import require_function, require_mesh, written_here
from .forward_first import filled, forward_first
from .functional import functional
from .keywords import bind_positional, explain_keywords, with_keywords
from .local_function import (
    Applied,
    LocalFunction,
    applied_to,
    as_local_function,
    axis_mesh,
    refuse_idle_states,
    refuse_unknown_axes,
    specs_per_leaf,
)
from .relayout import relayout, relayout_leaf
from .request import PyTree, Request, SpecTree
from .resolved import Resolved, Resolver, beside
from .snapshot import Snapshot
from .stacked import StackedTree
from .tiled import into_tiles, tiled
