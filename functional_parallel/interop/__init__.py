"""Entries for scripts and configurations of other libraries, in terms of this library."""

from . import deepspeed, hugging_face
from .hugging_face import load_pretrained, save_pretrained
from .parallel_functions import Replica, gather, parallel_apply, replicate, scatter
from .prepare import PreparedStep, prepare

__all__ = [
    "PreparedStep",
    "Replica",
    "deepspeed",
    "gather",
    "hugging_face",
    "load_pretrained",
    "parallel_apply",
    "prepare",
    "replicate",
    "save_pretrained",
    "scatter",
]
