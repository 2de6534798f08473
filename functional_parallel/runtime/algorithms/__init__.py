"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from . import starting
from .choose import SIZES, AlgorithmSelector, requested_algorithm
from .roll_call import CallCheck
from .table import ALGORITHMS, Algorithm
from .team import COMPLETED, ROLL_CALL, AlgorithmGroup, RankGroup, TaggedMessages

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
    "requested_algorithm",
    "starting",
]
