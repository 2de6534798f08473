"""Where programs run: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .calls import CollectiveError, OutOfStepError, OverlapError, note_step, rank_name
from .default import default_runtime, is_main_rank, rank, use_runtime
from .execution import BackendError, Origin, check_backend
from .handles import Placed, own, storages, who_holds
from .pipelined import PipelineRuntime
from .processes import DifferentInputsError, DifferentProgramsError, ProcessRuntime
from .simulated import SimulatedRuntime

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
    "rank",
    "rank_name",
    "storages",
    "use_runtime",
    "who_holds",
]
