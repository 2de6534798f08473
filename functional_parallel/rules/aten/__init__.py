"""Table of sharding rules with one entry per aten op.

A rule is text. It contains code only if the notation cannot express it.
"""

from . import (
    batch_norms,
    batched,
    contractions,
    elementwise_losses,
    factories,
    gradients,
    linear_algebra,
    lookups,
    losses,
    norms,
    pointwise,
    reductions,
    shapes,
    vision,
)
from .batch_norms import batch_norm
from .losses import cross_entropy, fuse_cross_entropy
from .shapes import reshaped_place

__all__ = [
    "batch_norm",
    "batch_norms",
    "batched",
    "contractions",
    "cross_entropy",
    "elementwise_losses",
    "factories",
    "fuse_cross_entropy",
    "gradients",
    "linear_algebra",
    "lookups",
    "losses",
    "norms",
    "pointwise",
    "reductions",
    "reshaped_place",
    "shapes",
    "vision",
]
