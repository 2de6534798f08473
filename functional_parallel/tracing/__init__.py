"""Function → FX graph: own recording of aten ops and collectives on fake tensors."""

from . import without_values
from .assumptions import Assumption, Programs, assume, assumed
from .closed_over import ClosedOver
from .enclosing import Enclosed
from .interception import intercept, intercept_op
from .known import assume_constants, constant_in
from .layout_questions import depends_on_layouts
from .memory_layout import LayoutRead, require_contiguous
from .record import Recorder, needs_values, recorder, trace
from .straight_through import OP as STRAIGHT_THROUGH
from .switches import autocasts, switched_off

__all__ = [
    "STRAIGHT_THROUGH",
    "Assumption",
    "ClosedOver",
    "Enclosed",
    "LayoutRead",
    "Programs",
    "Recorder",
    "assume",
    "assume_constants",
    "assumed",
    "autocasts",
    "constant_in",
    "depends_on_layouts",
    "intercept",
    "intercept_op",
    "needs_values",
    "recorder",
    "require_contiguous",
    "switched_off",
    "trace",
    "without_values",
]
