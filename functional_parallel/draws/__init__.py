"""Definition of keyed draws as functions of keys and positions in full tensors, and kernels that draw the same bits."""

from .definition import GOLDEN, defined, mixed, numbers, places
from .kernels import drawn
