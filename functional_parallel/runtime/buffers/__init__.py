"""Tensors in one buffer: packed into the send buffer, unpacked into their destinations, summed in rank order."""

from .joined import as_bytes, cat_or_view, flat_if_adjacent, from_bytes, ordered_sum
from .packed import ConcatReader, LazyBucket, Operand, to_tensor
from .unpacked import BucketLayout, BucketOutput, DirectOutputs, FlatOutputs, SlicedBucket
