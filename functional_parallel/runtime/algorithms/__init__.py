"""Algorithms for collectives of real processes, written over messages or shared memory, and their selection."""

from . import launch
from .algorithm_group import COMPLETED, ROLL_CALL, AlgorithmGroup, RankGroup, TaggedMessages
from .selection import Selection, requested_algorithm, select
from .table import ALGORITHMS, Algorithm
