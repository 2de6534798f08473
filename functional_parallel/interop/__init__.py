"""Entries for scripts and configurations of other libraries, in terms of this one."""

from . import deepspeed
from .prepare import PreparedStep, prepare

__all__ = ["PreparedStep", "deepspeed", "prepare"]
