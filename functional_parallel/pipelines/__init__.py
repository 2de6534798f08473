"""A step cut into the stages of a pipeline: their programs, what passes between them, what runs before and after."""

from .build import PipelinePlan, build
from .cut import BALANCES, Cut
from .epilogue import Epilogue, Exchange, Given
from .extract import Part
from .layers import MeasuredLayer, measure
from .program import PipelineProgram, updates_of
from .roles import PipelineError
from .stacks import Stacks, unstacked
from .stages import Stage, Work

__all__ = [
    "BALANCES",
    "Cut",
    "Epilogue",
    "Exchange",
    "Given",
    "MeasuredLayer",
    "Part",
    "PipelineError",
    "PipelinePlan",
    "PipelineProgram",
    "Stacks",
    "Stage",
    "Work",
    "build",
    "measure",
    "unstacked",
    "updates_of",
]
