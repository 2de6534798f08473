"""Pipelined steps: programs of the stages, messages between stages, and programs before and after the pipeline."""

from .accumulate import accumulate_in_place
from .build import PipelineRequest, build, build_stages, classify_ops, pipeline_of
from .cut import BALANCES, CutSpec, finest, stage_of_layer
from .epilogue import Epilogue, Transfer
from .epilogue_graph import EpilogueInput
from .execution import AsyncRankExecutor, Executor, RankExecutor, RunProgram, ScheduleRunner, slices_of
from .extract import Subprogram
from .memory import PIPELINE_KINDS, PipelineMemory
from .program import PipelineProgram
from .roles import OpRole, OpRoles
from .stacks import StackedLayers, Stacks, stacks_of, unstacked
from .stages import ActionPrograms, Stage
from .structure import updates_of

__all__ = [
    "BALANCES",
    "PIPELINE_KINDS",
    "ActionPrograms",
    "AsyncRankExecutor",
    "CutSpec",
    "Epilogue",
    "EpilogueInput",
    "Executor",
    "OpRole",
    "OpRoles",
    "PipelineMemory",
    "PipelineProgram",
    "PipelineRequest",
    "RankExecutor",
    "RunProgram",
    "ScheduleRunner",
    "StackedLayers",
    "Stacks",
    "Stage",
    "Subprogram",
    "Transfer",
    "accumulate_in_place",
    "build",
    "build_stages",
    "classify_ops",
    "finest",
    "pipeline_of",
    "slices_of",
    "stacks_of",
    "stage_of_layer",
    "unstacked",
    "updates_of",
]
