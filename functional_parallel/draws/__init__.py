"""Definition of keyed draws as functions of keys and positions in full tensors, and kernels that draw the same bits."""

from .definition import GOLDEN, defined_kept, defined_uniform, mixed
from .kernels import kept, uniform
