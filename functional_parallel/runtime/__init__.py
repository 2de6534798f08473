"""Runtimes of programs: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .calls import CollectiveError, OutOfStepError, OverlapError, note_step, rank_name
from .default import default_runtime, is_main_rank, rank, use_runtime
from .execution import BackendError, Origin, check_backend
from .handles import PipelineValue, copy_if_aliased, runtime_kind_of, storages
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
    "PipelineValue",
    "ProcessRuntime",
    "SimulatedRuntime",
    "check_backend",
    "copy_if_aliased",
    "default_runtime",
    "is_main_rank",
    "note_step",
    "rank",
    "rank_name",
    "runtime_kind_of",
    "storages",
    "use_runtime",
]
