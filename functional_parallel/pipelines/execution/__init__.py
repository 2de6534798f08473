"""Execution of a pipeline: state and actions of each rank, and a simulation of its memory."""

from .async_executor import AsyncRankExecutor, Executor
from .memory_simulator import pipeline_memory
from .rank_executor import RankExecutor, RunProgram
from .schedule_runner import Mailbox, ScheduleRunner, slices_of
