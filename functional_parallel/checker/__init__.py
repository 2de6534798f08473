"""Checker: infer the state of every value of a traced program on each mesh axis, and refuse invalid uses."""

from .argument_checks import OP as DECLARED
from .argument_checks import check_arguments, known_spec, record_input_specs, type_of_spec
from .equal_copies import warn_of_equal_copies
from .typed import run_typed
from .typing import Typing, is_zero, mismatch, type_of
