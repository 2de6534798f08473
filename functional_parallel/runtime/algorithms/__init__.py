"""Algorithms for collectives of real processes, written over messages or shared memory, and their selection."""

from . import launch
from .algorithm_group import COMPLETED, ROLL_CALL, AlgorithmGroup, RankGroup, TaggedMessages
from .call_check import CallCheck
from .selection import Selection, requested_algorithm, select
from .table import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "COMPLETED",
    "ROLL_CALL",
    "Algorithm",
    "AlgorithmGroup",
    "CallCheck",
    "RankGroup",
    "Selection",
    "TaggedMessages",
    "launch",
    "requested_algorithm",
    "select",
]
