"""Optimizers as pairs of pure functions that run unchanged on shards, and learning-rate schedules."""

from . import schedules
from .adafactor import AdafactorState, Factored, adafactor
from .adam import adam
from .adamw import AdamWState, adamw
from .host_rates import counted_on_host
from .lion import LionState, lion
from .optimizer import Optimizer, Schedule, clip_value
from .optimizer import is_known_elementwise as is_known_elementwise
from .optimizer import skips_untrained as skips_untrained
from .sgd import SGDState, sgd

__all__ = [
    "AdafactorState",
    "AdamWState",
    "Factored",
    "LionState",
    "Optimizer",
    "SGDState",
    "Schedule",
    "adafactor",
    "adam",
    "adamw",
    "clip_value",
    "counted_on_host",
    "lion",
    "schedules",
    "sgd",
]
