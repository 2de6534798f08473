"""Watch thread of a process, which ends waits that cannot end.

Every rank holds one connection to rank 0, which closes when the process dies. A rank that waits for seconds sends its
position; rank 0 compares the positions. The thread does not slow down steps: it wakes once a second.
"""

from .connections import host_identity, recorded
from .lines import keep_alive
from .start import START_VARIABLE, launched_store, own_addresses, start_seconds, watch_processes
from .watch import Watch
