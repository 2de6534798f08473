"""Execution of pipelines: values that a rank holds, its actions, and messages between ranks."""

from .pipelined import PipelineRuntime
