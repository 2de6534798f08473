"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from .choose import SIZES, Chooser, setting
from .running import Steps
from .table import ALGORITHMS, Algorithm
from .team import Team

__all__ = ["ALGORITHMS", "SIZES", "Algorithm", "Chooser", "Steps", "Team", "setting"]
