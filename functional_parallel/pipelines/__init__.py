"""A step cut into the stages of a pipeline: their programs, what passes between them, what runs before and after."""

from .build import PipelinePlan, build, prepared, staged
from .cut import BALANCES, Cut, finest, stage_of_layer
from .epilogue import Epilogue, Exchange
from .execution import RankExecutor, Run, Stream, Worker, slices_of
from .extract import Part
from .late_graph import Given
from .memory import PIPELINE_KINDS, PipelineMemory
from .names import forget_ops, names_in
from .program import PipelineProgram
from .roles import PipelineError, Role, Roles
from .stacks import Stacks, unstacked
from .stages import Stage, Work
from .structure import updates_of
from .sums import add_in_place

__all__ = [
    "BALANCES",
    "PIPELINE_KINDS",
    "Cut",
    "Epilogue",
    "Exchange",
    "Given",
    "Part",
    "PipelineError",
    "PipelineMemory",
    "PipelinePlan",
    "PipelineProgram",
    "RankExecutor",
    "Role",
    "Roles",
    "Run",
    "Stacks",
    "Stage",
    "Stream",
    "Work",
    "Worker",
    "add_in_place",
    "build",
    "finest",
    "forget_ops",
    "names_in",
    "prepared",
    "slices_of",
    "stage_of_layer",
    "staged",
    "unstacked",
    "updates_of",
]
