"""Entries for scripts and configurations of other libraries, in terms of this one."""

from . import deepspeed
from .prepare import PreparedStep, prepare
from .replicas import Replica, gather, parallel_apply, replicate, scatter

__all__ = ["PreparedStep", "Replica", "deepspeed", "gather", "parallel_apply", "prepare", "replicate", "scatter"]
