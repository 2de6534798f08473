"""One rank of a mesh per process, over torch.distributed."""

from .bystander import Bystander
from .groups import Axes, AxisGroup
from .point_to_point import PointToPoint
from .process_communicator import GATHERED, ProcessCommunicator
from .processes import ProcessRuntime
from .rank_program import RankProgram, Readers
from .torch_messages import COMPLETED, Messages
from .transports import ALGORITHM_VARIABLE, TRANSPORTS, Transport, communicator
