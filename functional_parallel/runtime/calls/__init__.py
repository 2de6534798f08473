"""Collectives under way: what each rank is doing, what it waits for, and what errors say of it."""

from .doing import READS, Doing, OutOfStepError, is_ahead
from .handle import Handle
from .pending import Pending
from .running import Running, Steps, Waitable
from .turn import OverlapError, Turn
from .waiting import CURRENT, Lost, Wait, brief, note_step, waiting
from .waits import CollectiveError, CollectiveWait, NamedWait, WaitFor, rank_name, rank_names

__all__ = [
    "CURRENT",
    "READS",
    "CollectiveError",
    "CollectiveWait",
    "Doing",
    "Handle",
    "Lost",
    "NamedWait",
    "OutOfStepError",
    "OverlapError",
    "Pending",
    "Running",
    "Steps",
    "Turn",
    "Wait",
    "WaitFor",
    "Waitable",
    "brief",
    "is_ahead",
    "note_step",
    "rank_name",
    "rank_names",
    "waiting",
]
