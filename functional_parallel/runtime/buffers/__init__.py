"""Tensors in one buffer: packed into the send buffer, unpacked into their destinations, summed in rank order."""

from .packed import ConcatReader, LazyBucket, to_tensor
from .sums import ordered_sum
from .unpacked import BucketLayout, BucketOutput, DirectOutputs, FlatOutputs, SlicedBucket
from .zero_copy import as_bytes, cat_or_view, flat_or_view, from_bytes

__all__ = [
    "BucketLayout",
    "BucketOutput",
    "ConcatReader",
    "DirectOutputs",
    "FlatOutputs",
    "LazyBucket",
    "SlicedBucket",
    "as_bytes",
    "cat_or_view",
    "flat_or_view",
    "from_bytes",
    "ordered_sum",
    "to_tensor",
]
