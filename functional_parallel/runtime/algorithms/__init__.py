"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from . import starting
from .choose import SIZES, Chooser, setting
from .roll_call import RollCall
from .table import ALGORITHMS, Algorithm
from .team import NOTHING, ROLL_CALL, Messages, Ranks, Team

__all__ = [
    "ALGORITHMS",
    "NOTHING",
    "ROLL_CALL",
    "SIZES",
    "Algorithm",
    "Chooser",
    "Messages",
    "Ranks",
    "RollCall",
    "Team",
    "setting",
    "starting",
]
