"""Partition a function that is global with respect to one mesh axis into a function that is local to it."""

from . import own_ops  # its import registers their rules
from .function import Partitioning, partition
from .preparation import prepare
from .shard_map import call_shard_map
