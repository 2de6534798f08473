"""The execution of a pipeline: what a rank holds, what its actions do, and the same on sizes alone."""

from .on_sizes import pipeline_memory
from .rank import Mailbox, ScheduleRunner, slices_of
from .stream import AsyncRankExecutor
from .worker import RankExecutor, RunProgram

__all__ = [
    "AsyncRankExecutor",
    "Mailbox",
    "RankExecutor",
    "RunProgram",
    "ScheduleRunner",
    "pipeline_memory",
    "slices_of",
]
