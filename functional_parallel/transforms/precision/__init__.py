"""Mixed precision: computation in a low-precision dtype, with sensitive values in float32."""

from .transform import mixed_precision
