"""Optimizers as pairs of pure functions that run unchanged on shards, and learning-rate schedules."""

from . import schedules
from .adafactor import AdafactorState, Factored, adafactor
from .adagrad import AdagradState, adagrad
from .adamw import AdamWState, adam, adamw, scale_by_adam
from .by_path import ByPathState, by_path
from .by_path import PathSet as PathSet
from .chain import ChainState, Transformation, add_decayed_weights, chain, scale_by_learning_rate
from .host_rates import counted_on_host
from .lamb import LambState, lamb
from .lion import LionState, lion, scale_by_lion
from .muon import MuonState, muon
from .optimizer import Optimizer, Schedule, clip_value
from .optimizer import is_known_elementwise as is_known_elementwise
from .optimizer import rates as rates
from .optimizer import scheduled_rates as scheduled_rates
from .optimizer import skips_untrained as skips_untrained
from .sgd import SGDState, sgd, trace
from .state_trees import like_params as like_params
from .state_trees import likes as likes
from .state_trees import tree_map_params as tree_map_params

__all__ = [
    "AdafactorState",
    "AdagradState",
    "AdamWState",
    "ByPathState",
    "ChainState",
    "Factored",
    "LambState",
    "LionState",
    "MuonState",
    "Optimizer",
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
    "lamb",
    "lion",
    "muon",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "schedules",
    "sgd",
    "trace",
]
