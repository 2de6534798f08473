"""Mixed precision: a function computed in a narrow type, with what must not round kept wide."""

from .transform import mixed_precision

__all__ = ["mixed_precision"]
