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
from .waiting import CURRENT, Lost, Wait, note_step, waiting

__all__ = [
    "ALGORITHMS",
    "CURRENT",
    "NOTHING",
    "READS",
    "ROLL_CALL",
    "SIZES",
    "Algorithm",
    "Chooser",
    "Doing",
    "Handle",
    "Layout",
    "Lost",
    "Messages",
    "OutOfStepError",
    "Packed",
    "Ranks",
    "RollCall",
    "Steps",
    "Stretches",
    "Team",
    "Unpacked",
    "Wait",
    "note_step",
    "setting",
    "starting",
    "waiting",
    "whole",
]
