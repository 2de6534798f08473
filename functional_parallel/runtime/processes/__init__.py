"""One rank of a mesh per process, over torch.distributed."""

from .processes import DifferentInputsError, DifferentProgramsError, ProcessRuntime

__all__ = [
    "DifferentInputsError",
    "DifferentProgramsError",
    "ProcessRuntime",
]
