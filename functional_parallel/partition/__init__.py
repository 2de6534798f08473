"""Partition: a function that is global with respect to one mesh axis → one that is local to it."""

from .function import partition
from .run import PartitionError, PartitionWarning

__all__ = ["PartitionError", "PartitionWarning", "partition"]
