"""Optimizers as pairs of pure functions that run unchanged on shards, and learning-rate schedules."""

from . import schedules
from .adafactor import AdafactorState, Factored, adafactor
from .adagrad import AdagradState, adagrad
from .adamw import AdamWState, adam, adamw, scale_by_adam
from .by_path import ByPathState, PathSet, by_path
from .chain import ChainState, Transformation, add_decayed_weights, chain, scale_by_learning_rate
from .delayed import delayed
from .ema import ema
from .host_rates import counted_on_host
from .lamb import LambState, lamb
from .lion import LionState, lion, scale_by_lion
from .muon import MuonState, muon
from .optimizer import (
    DelayedState,
    EMAState,
    Optimizer,
    Schedule,
    clip_value,
    is_declared_elementwise,
    rates,
    scheduled_rates,
)
from .quantised import QuantisedMoment, quantised
from .sgd import SGDState, sgd, trace
from .state_trees import like_params, tree_map_of_params, tree_map_params

__all__ = [
    "AdafactorState",
    "AdagradState",
    "AdamWState",
    "ByPathState",
    "ChainState",
    "DelayedState",
    "EMAState",
    "Factored",
    "LambState",
    "LionState",
    "MuonState",
    "Optimizer",
    "QuantisedMoment",
    "SGDState",
    "Schedule",
    "Transformation",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "by_path",
    "chain",
    "clip_value",
    "counted_on_host",
    "delayed",
    "ema",
    "lamb",
    "lion",
    "muon",
    "quantised",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "schedules",
    "sgd",
    "trace",
]
