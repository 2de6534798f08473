"""From a function on shards to a program that runs: traced, typed, checked, cut into microbatches, its passes run."""

from .region import call_region
from .stage import UNCHECKED, LayoutError, OutSpecError, Staged, stage

__all__ = ["UNCHECKED", "LayoutError", "OutSpecError", "Staged", "call_region", "stage"]
