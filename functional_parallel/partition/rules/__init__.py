"""The table of sharding rules: one entry per aten op, text first, code only where text cannot say it."""

from . import (
    attention,
    batch_norm,
    batched,
    collective,
    contractions,
    draws,
    elementwise_losses,
    factories,
    linear_algebra,
    lookups,
    losses,
    norms,
    pointwise,
    reductions,
    shapes,
    vision,
)
from .registry import Rule, lookup, register_rule

__all__ = [
    "Rule",
    "attention",
    "batch_norm",
    "batched",
    "collective",
    "contractions",
    "draws",
    "elementwise_losses",
    "factories",
    "linear_algebra",
    "lookup",
    "lookups",
    "losses",
    "norms",
    "pointwise",
    "reductions",
    "register_rule",
    "shapes",
    "vision",
]
