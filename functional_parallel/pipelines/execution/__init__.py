"""The execution of a pipeline: what a rank holds, what its actions do, and the same on sizes alone."""

from .async_executor import AsyncRankExecutor
from .memory_simulator import pipeline_memory
from .rank_executor import RankExecutor, RunProgram
from .schedule_runner import Mailbox, ScheduleRunner, slices_of

__all__ = [
    "AsyncRankExecutor",
    "Mailbox",
    "RankExecutor",
    "RunProgram",
    "ScheduleRunner",
    "pipeline_memory",
    "slices_of",
]
