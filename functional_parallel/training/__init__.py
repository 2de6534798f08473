"""Training steps: gradient, clipping and optimizer as one program, sharded by a plan."""

from .local_step import Metrics
from .state import TrainState
from .step import TrainStep, train_step

__all__ = [
    "Metrics",
    "TrainState",
    "TrainStep",
    "train_step",
]
