"""Mixed precision: computation in a low-precision dtype, with sensitive values in float32 and loss scaling."""

from .loss_scaling import LossScale, LossScaleError, LossScaleState
from .transform import mixed_precision

__all__ = ["LossScale", "LossScaleError", "LossScaleState", "mixed_precision"]
