"""Partition: a function that is global with respect to one mesh axis → one that is local to it."""

from . import own_ops
from .function import partition, place_of
from .preparation import prepare
from .run import PartitionError, PartitionWarning

__all__ = [
    "PartitionError",
    "PartitionWarning",
    "own_ops",
    "partition",
    "place_of",
    "prepare",
]
