"""The executor of pipelines: what a rank holds, what its actions do, and messages between ranks."""

from .pipelined import PipelineRuntime

__all__ = [
    "PipelineRuntime",
]
