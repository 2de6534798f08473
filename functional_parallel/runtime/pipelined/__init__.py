"""The executor of pipelines: what a rank holds, what its actions do, and messages between ranks."""

from .on_sizes import pipeline_memory
from .pipelined import PipelineRuntime

__all__ = [
    "PipelineRuntime",
    "pipeline_memory",
]
