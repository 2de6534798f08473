"""From a function on shards to a program that runs: traced, typed, checked, cut into microbatches, its passes run."""

from .leftovers import traced_in
from .lower import UNCHECKED, LayoutError, Lowered, OutSpecError, lower, lowering
from .options import ArgumentPaths, Options
from .region import call_region

__all__ = [
    "UNCHECKED",
    "ArgumentPaths",
    "LayoutError",
    "Lowered",
    "Options",
    "OutSpecError",
    "call_region",
    "lower",
    "lowering",
    "traced_in",
]
