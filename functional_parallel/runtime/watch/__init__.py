"""A thread per process that knows which ranks still run and what they wait for, and ends waits that cannot end.

Every rank holds one connection to rank 0, which closes when a process dies, however it dies. A rank that waits for
seconds sends its position; rank 0 compares the positions. The thread costs a step nothing: it wakes once a second.
"""

from .connections import recorded
from .start import START_VARIABLE, environment_store, start_seconds, watch_processes
from .watch import Watch

__all__ = ["START_VARIABLE", "Watch", "environment_store", "recorded", "start_seconds", "watch_processes"]
