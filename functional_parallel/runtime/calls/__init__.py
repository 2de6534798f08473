"""Collectives in flight: the current call of each rank, its waits, and the errors that report them."""

from .call_guard import CallGuard
from .call_log import READS, SAME_CALLS, CallLog, GroupWaits, is_ahead
from .handle import ProcessGroupRef
from .pending import PendingCollective, Waitable
from .waits import CURRENT, Lost, NamedWait, brief, note_step, rank_name, rank_names
