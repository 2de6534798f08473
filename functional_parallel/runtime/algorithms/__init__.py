"""Algorithms for collectives of real processes, each a few lines over messages or shared memory, and which to use."""

from . import starting
from .choose import SIZES, Chooser, setting
from .packed import Packed, whole
from .running import Steps
from .table import ALGORITHMS, Algorithm
from .team import NOTHING, Messages, Team
from .unpacked import Layout, Stretches, Unpacked

__all__ = [
    "ALGORITHMS",
    "NOTHING",
    "SIZES",
    "Algorithm",
    "Chooser",
    "Layout",
    "Messages",
    "Packed",
    "Steps",
    "Stretches",
    "Team",
    "Unpacked",
    "setting",
    "starting",
    "whole",
]
