"""Training steps: gradient, clipping and optimizer as one program, with everything sharded as the plan says."""

from .estimate import CONVENTIONS, activation_bytes, estimate
from .finite import NonFiniteError
from .local_step import Metrics
from .state import DonatedStateError, TrainState
from .step import train_step
from .untrained import NothingToTrainError, NotTrainedWarning

__all__ = [
    "CONVENTIONS",
    "DonatedStateError",
    "Metrics",
    "NonFiniteError",
    "NotTrainedWarning",
    "NothingToTrainError",
    "TrainState",
    "activation_bytes",
    "estimate",
    "train_step",
]
