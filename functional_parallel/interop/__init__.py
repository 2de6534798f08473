"""Entries for scripts written for other libraries: training loops of torch, with its optimizers and schedulers."""

from .prepare import PreparedStep, prepare

__all__ = ["PreparedStep", "prepare"]
