"""Training steps: gradient, clipping and optimizer as one program, sharded by a plan."""

from .kept_states import parameters_of
from .local_step import Metrics
from .step import TrainStep, train_step
from .step_options import require_arguments
from .train_state import TrainState
from .update import StepLayout, require_elementwise
