"""The table of sharding rules: one entry per aten op, text first, code only where text cannot say it."""

from . import attention, collective, contractions, factories, lookups, norms, pointwise, reductions, shapes, vision
from .registry import Rule, lookup, register_rule

__all__ = [
    "Rule",
    "attention",
    "collective",
    "contractions",
    "factories",
    "lookup",
    "lookups",
    "norms",
    "pointwise",
    "reductions",
    "register_rule",
    "shapes",
    "vision",
]
