"""A step cut into the stages of a pipeline: their programs, what passes between them, what runs before and after."""

from .build import PipelinePlan, build
from .cut import BALANCES, Cut, stage_of_layer
from .epilogue import Epilogue, Exchange
from .extract import Part
from .late_graph import Given
from .layers import MeasuredLayer, measure
from .memory import PipelineMemory
from .one_microbatch import end_one_microbatch
from .program import PipelineProgram
from .roles import PipelineError
from .stacks import Stacks, unstacked
from .stages import Stage, Work
from .structure import updates_of
from .sums import add_in_place

__all__ = [
    "BALANCES",
    "Cut",
    "Epilogue",
    "Exchange",
    "Given",
    "MeasuredLayer",
    "Part",
    "PipelineError",
    "PipelineMemory",
    "PipelinePlan",
    "PipelineProgram",
    "Stacks",
    "Stage",
    "Work",
    "add_in_place",
    "build",
    "end_one_microbatch",
    "measure",
    "stage_of_layer",
    "unstacked",
    "updates_of",
]
