"""Tracing of a function into an FX graph, by recording aten ops and collectives on fake tensors."""

from . import data_dependent
from .assumptions import Assumption, ProgramCache, assume, collect_assumptions
from .closed_over import ClosedOver
from .constant_folding import assume_constants, constant_in
from .enclosing import CapturedTensors
from .interception import Replaced, intercept, intercept_op
from .layout_questions import depends_on_layouts
from .memory_layout import LayoutRead, require_contiguous
from .record import Recorder, needs_values, recorder, trace
from .straight_through import OP as STRAIGHT_THROUGH
from .switches import autocast_dtypes, disable_ambient_modes

__all__ = [
    "STRAIGHT_THROUGH",
    "Assumption",
    "CapturedTensors",
    "ClosedOver",
    "LayoutRead",
    "ProgramCache",
    "Recorder",
    "Replaced",
    "assume",
    "assume_constants",
    "autocast_dtypes",
    "collect_assumptions",
    "constant_in",
    "data_dependent",
    "depends_on_layouts",
    "disable_ambient_modes",
    "intercept",
    "intercept_op",
    "needs_values",
    "recorder",
    "require_contiguous",
    "trace",
]
