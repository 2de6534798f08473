"""Function → FX graph: own recording of aten ops and collectives on fake tensors."""

from . import without_values
from .errors import CustomFunctionError, MutationError, TracingError
from .graph import Aval, Traced, aval_of, hollow, source_of
from .layers import fold_layers
from .record import trace
from .simplify import forget_values, simplify
from .views import fuse_views

__all__ = [
    "Aval",
    "CustomFunctionError",
    "MutationError",
    "Traced",
    "TracingError",
    "aval_of",
    "fold_layers",
    "forget_values",
    "fuse_views",
    "hollow",
    "simplify",
    "source_of",
    "trace",
    "without_values",
]
