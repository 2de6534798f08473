"""Pipelined steps: programs of the stages, messages between stages, and programs before and after the pipeline."""

from .build import PipelineRequest, StagedStep, build, finest_stages, pipeline_of, stages_of
from .cut import BALANCES, CutSpec, stage_of_layer
from .execution import AsyncRankExecutor, Executor, RankExecutor, RunProgram, ScheduleRunner, slices_of
from .pairs import pairs_of
from .pipeline_memory import PipelineMemory
from .pipeline_program import PipelineProgram
from .stacks import unstacked
from .structure import updates_of
