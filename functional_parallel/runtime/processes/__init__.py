"""One rank of a mesh per process, over torch.distributed."""

from .process_communicator import ProcessCommunicator
from .processes import ProcessRuntime
