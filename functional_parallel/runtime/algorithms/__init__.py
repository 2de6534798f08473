"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from .choose import SIZES, Chooser, setting
from .running import Steps
from .table import ALGORITHMS, Algorithm
from .team import NOTHING, Messages, Team

__all__ = ["ALGORITHMS", "NOTHING", "SIZES", "Algorithm", "Chooser", "Messages", "Steps", "Team", "setting"]
