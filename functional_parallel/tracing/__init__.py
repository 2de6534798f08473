"""Function → FX graph: own recording of aten ops and collectives on fake tensors."""

from . import without_values
from .errors import CustomFunctionError, MemoryLayoutError, MutationError, TracingError
from .graph import Aval, Traced, aval_of, hollow, source_of
from .layers import fold_layers
from .layout_questions import depends_on_layouts
from .memory_layout import LayoutRead, require_contiguous
from .record import needs_values, trace
from .simplify import forget_values, simplify
from .views import fuse_views

__all__ = [
    "Aval",
    "CustomFunctionError",
    "LayoutRead",
    "MemoryLayoutError",
    "MutationError",
    "Traced",
    "TracingError",
    "aval_of",
    "depends_on_layouts",
    "fold_layers",
    "forget_values",
    "fuse_views",
    "hollow",
    "needs_values",
    "require_contiguous",
    "simplify",
    "source_of",
    "trace",
    "without_values",
]
