"""From a function on shards to a program that runs: traced, typed, checked, cut into microbatches, its passes run."""

from .leftovers import traced_in
from .lower import UNCHECKED, LayoutError, OutSpecError, Staged, stage
from .region import call_region

__all__ = [
    "UNCHECKED",
    "LayoutError",
    "OutSpecError",
    "Staged",
    "call_region",
    "stage",
    "traced_in",
]
