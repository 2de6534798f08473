"""Entries for scripts and configurations of other libraries, in terms of this one."""

from . import deepspeed, hugging_face
from .parallel_functions import Replica, gather, parallel_apply, replicate, scatter
from .prepare import PreparedStep, prepare

__all__ = [
    "PreparedStep",
    "Replica",
    "deepspeed",
    "gather",
    "hugging_face",
    "parallel_apply",
    "prepare",
    "replicate",
    "scatter",
]
