"""Mixed precision: computation in a low-precision dtype, with sensitive values in float32."""

from .mixed_precision import mixed_precision
