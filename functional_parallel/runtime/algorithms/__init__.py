"""Algorithms for collectives of real processes, written over messages or shared memory, and their selection."""

from . import launch
from .algorithm_group import COMPLETED, ROLL_CALL, AlgorithmGroup, RankGroup, TaggedMessages
from .call_check import CallCheck
from .choose import SIZES, AlgorithmSelector, requested_algorithm
from .table import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "COMPLETED",
    "ROLL_CALL",
    "SIZES",
    "Algorithm",
    "AlgorithmGroup",
    "AlgorithmSelector",
    "CallCheck",
    "RankGroup",
    "TaggedMessages",
    "launch",
    "requested_algorithm",
]
