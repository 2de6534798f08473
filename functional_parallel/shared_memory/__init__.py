"""Transport of collectives and messages through memory that the ranks of one host share, for gloo.

It registers itself.
"""

from ..program import extra_memory
from ..runtime import TRANSPORTS, Transport
from .shared_communicator import SharedMemoryCommunicator
from .sizes import SharedMemorySizes
from .zero_copy import ZeroCopyProgram

TRANSPORTS["shared"] = Transport(SharedMemoryCommunicator, ZeroCopyProgram)
extra_memory.use(SharedMemorySizes())
