"""Optimizers as pairs of pure functions, elementwise, so that they run unchanged on shards."""

from .adamw import AdamWState, adamw
from .optimizer import Optimizer, Schedule
from .sgd import SGDState, sgd

__all__ = ["AdamWState", "Optimizer", "SGDState", "Schedule", "adamw", "sgd"]
