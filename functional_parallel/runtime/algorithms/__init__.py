"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from . import starting
from .choose import SIZES, Chooser, setting
from .doing import READS, Doing, OutOfStepError
from .handle import Handle
from .packed import Packed, whole
from .roll_call import RollCall
from .running import Steps
from .table import ALGORITHMS, Algorithm
from .team import NOTHING, ROLL_CALL, Messages, Ranks, Team
from .unpacked import Layout, Stretches, Unpacked

__all__ = [
    "ALGORITHMS",
    "NOTHING",
    "READS",
    "ROLL_CALL",
    "SIZES",
    "Algorithm",
    "Chooser",
    "Doing",
    "Handle",
    "Layout",
    "Messages",
    "OutOfStepError",
    "Packed",
    "Ranks",
    "RollCall",
    "Steps",
    "Stretches",
    "Team",
    "Unpacked",
    "setting",
    "starting",
    "whole",
]
