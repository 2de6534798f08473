"""Training steps: gradient, clipping and optimizer as one program, sharded by a plan."""

from .local_step import Metrics
from .options import require_arguments
from .state import TrainState
from .step import TrainStep, train_step
from .update import StepLayout, require_elementwise
