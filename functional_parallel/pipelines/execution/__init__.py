"""The execution of a pipeline: what a rank holds, what its actions do, and the same on sizes alone."""

from .on_sizes import pipeline_memory
from .rank import Mailbox, RankExecutor, slices_of
from .stream import Stream
from .worker import Run, Worker

__all__ = [
    "Mailbox",
    "RankExecutor",
    "Run",
    "Stream",
    "Worker",
    "pipeline_memory",
    "slices_of",
]
