"""Tensors in one buffer: packed where they are sent from, unpacked where they belong, summed in rank order."""

from .packed import EndToEnd, Packed, whole
from .sums import ordered_sum
from .unpacked import InPlace, Layout, OutOfWhole, Stretches, Unpacked
from .zero_copy import as_bytes, from_bytes, joined, whole_of

__all__ = [
    "EndToEnd",
    "InPlace",
    "Layout",
    "OutOfWhole",
    "Packed",
    "Stretches",
    "Unpacked",
    "as_bytes",
    "from_bytes",
    "joined",
    "ordered_sum",
    "whole",
    "whole_of",
]
