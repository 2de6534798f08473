"""Training steps: gradient, clipping and optimizer as one program, sharded by a plan."""

from .finite import NonFiniteError
from .local_step import Metrics
from .state import DonatedStateError, TrainState
from .step import TrainStep, train_step
from .untrained import NothingToTrainError, NotTrainedWarning
from .update import tree_map_params

__all__ = [
    "DonatedStateError",
    "Metrics",
    "NonFiniteError",
    "NotTrainedWarning",
    "NothingToTrainError",
    "TrainState",
    "TrainStep",
    "train_step",
    "tree_map_params",
]
