"""The typed primitives: each one a `torch.autograd.Function` around one library op.

Every block has the same order: type rule, forward, jvp, transpose, vmap. All but `pmax` and `pmin` are linear, so a jvp
is the primitive on the tangent and a backward is another primitive on the cotangent. Both go through `apply_primitive`,
never through a raw op, so that derivatives of derivatives work.
"""

from . import cast, extremes, gather, move, reduce
from .emit import apply_primitive, axis_index
from .extremes import NotDifferentiableError

__all__ = [
    "NotDifferentiableError",
    "apply_primitive",
    "axis_index",
    "cast",
    "extremes",
    "gather",
    "move",
    "reduce",
]
