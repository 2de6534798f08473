"""Where programs run: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .algorithms import OutOfStepError, note_step
from .default import default_runtime, is_main_rank, rank, use_runtime
from .handles import Placed, own, storages, who_holds
from .inductor import BackendError, check_backend
from .on_sizes import pipeline_memory
from .origins import Origin
from .pipelined import PipelineRuntime
from .processes import DifferentInputsError, DifferentProgramsError, ProcessRuntime
from .simulated import SimulatedRuntime
from .turn import OverlapError
from .waits import CollectiveError, rank_name

__all__ = [
    "BackendError",
    "CollectiveError",
    "DifferentInputsError",
    "DifferentProgramsError",
    "Origin",
    "OutOfStepError",
    "OverlapError",
    "PipelineRuntime",
    "Placed",
    "ProcessRuntime",
    "SimulatedRuntime",
    "check_backend",
    "default_runtime",
    "is_main_rank",
    "note_step",
    "own",
    "pipeline_memory",
    "rank",
    "rank_name",
    "storages",
    "use_runtime",
    "who_holds",
]
