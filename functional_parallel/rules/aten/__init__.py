"""Sharding rules of aten ops, registered by the import of a module. A rule contains code only if it needs it."""

from . import (
    factories,
    gradients,
    linear_algebra,
    lookups,
    losses,
    norms,
    pointwise,
    rearrangements,
    reductions,
    vision,
)
