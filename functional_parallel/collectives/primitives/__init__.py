"""Typed primitives. Each is a `torch.autograd.Function` around one library op.

Every block has the same order: type rule, forward, jvp, transpose, vmap. All primitives except `pmax` and `pmin` are
linear. A jvp is therefore the primitive on the tangent, and a backward is another primitive on the cotangent. Both call
`apply_primitive`, never a raw op, so that higher derivatives work.
"""

from . import cast, extremes, gather, move, reduce
from .emit import apply_primitive, axis_index

__all__ = [
    "apply_primitive",
    "axis_index",
    "cast",
    "extremes",
    "gather",
    "move",
    "reduce",
]
