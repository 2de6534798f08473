"""Functions on shards: layouts, positional arguments, grad, vmap, jvp and hessian, modules as functions."""

from .by_place import by_place
from .derivatives import grad, grad_and_value, hessian, jvp, unused, vmap
from .foreign import require_function, require_mesh, written_here
from .functional import functional
from .keywords import explain_keywords
from .local_function import (
    TAKEN,
    Layout,
    LocalFunction,
    PyTree,
    SpecTree,
    axis_mesh,
    full_specs,
    layout_of,
    refuse_unknown_axes,
    unsharded,
)

__all__ = [
    "TAKEN",
    "Layout",
    "LocalFunction",
    "PyTree",
    "SpecTree",
    "axis_mesh",
    "by_place",
    "explain_keywords",
    "full_specs",
    "functional",
    "grad",
    "grad_and_value",
    "hessian",
    "jvp",
    "layout_of",
    "refuse_unknown_axes",
    "require_function",
    "require_mesh",
    "unsharded",
    "unused",
    "vmap",
    "written_here",
]
