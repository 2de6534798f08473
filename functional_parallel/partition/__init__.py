"""Partition: a function that is global with respect to one mesh axis → one that is local to it."""

from .partition import partition
from .run import PartitionError, PartitionWarning

__all__ = ["PartitionError", "PartitionWarning", "partition"]
