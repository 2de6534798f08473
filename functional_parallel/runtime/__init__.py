"""Where programs run: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .default import default_runtime, is_main_rank, use_runtime
from .handles import Placed, own, storages
from .meeting import OutOfStepError
from .pending import CollectiveError
from .pipelined import PipelineRuntime
from .priced import pipeline_memory
from .processes import DifferentInputsError, DifferentProgramsError, ProcessRuntime
from .simulated import SimulatedRuntime

__all__ = [
    "CollectiveError",
    "DifferentInputsError",
    "DifferentProgramsError",
    "OutOfStepError",
    "PipelineRuntime",
    "Placed",
    "ProcessRuntime",
    "SimulatedRuntime",
    "default_runtime",
    "is_main_rank",
    "own",
    "pipeline_memory",
    "storages",
    "use_runtime",
]
