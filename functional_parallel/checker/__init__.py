"""The checker: what every value of a traced program is on each mesh axis, and what may be done with it."""

from .declared import OP as DECLARED
from .declared import ArgumentSpecError, checked_arguments, declared_type, say_specs
from .typed import run_typed
from .typing import Typing, TypingError, is_zero, type_of

__all__ = [
    "DECLARED",
    "ArgumentSpecError",
    "Typing",
    "TypingError",
    "checked_arguments",
    "declared_type",
    "is_zero",
    "run_typed",
    "say_specs",
    "type_of",
]
