"""Mixed precision: a function computed in a narrow type, with what must not round kept wide, and its loss scaled."""

from .loss_scaling import LossScale, LossScaleError, LossScaleState
from .transform import mixed_precision

__all__ = ["LossScale", "LossScaleError", "LossScaleState", "mixed_precision"]
