"""Tracing of a function into an FX graph, by recording aten ops and collectives on fake tensors."""

from . import autograd_state, data_dependent
from .assumptions import Assumption, ProgramCache, assume, collect_assumptions, is_kept
from .closed_over import ClosedOver
from .constant_folding import assume_constants, constant_in
from .enclosing import CapturedTensors
from .interception import Replaced, intercept, intercept_op
from .layout_questions import depends_on_layouts
from .memory_layout import LayoutRead, require_contiguous
from .reached import ReachedState
from .record import Recorder, needs_values, recorder, trace
from .recorded_calls import CopyableMode, RecordedCall
from .repeated import repeated
from .sites import AmbientKey, ambient_keys
from .straight_through import OP as STRAIGHT_THROUGH
from .switches import autocast_dtypes, disable_ambient_modes, gradients_wanted
from .valueless import stand_in, stand_ins, valueless
