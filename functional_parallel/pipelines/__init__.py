"""Pipelined steps: programs of the stages, messages between stages, and programs before and after the pipeline."""

from .accumulate import accumulate_in_place
from .build import PipelineRequest, build, build_stages, classify_ops, pipeline_of
from .cut import BALANCES, CutSpec, finest, stage_of_layer
from .execution import AsyncRankExecutor, Executor, RankExecutor, RunProgram, ScheduleRunner, slices_of
from .memory import PipelineMemory
from .program import PipelineProgram
from .stacks import StackedLayers, Stacks, stacks_of, unstacked
from .structure import updates_of
