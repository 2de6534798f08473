"""The checker: what every value of a traced program is on each mesh axis, and what may be done with it."""

from .typed import run_typed
from .typing import Typing, TypingError, is_zero, type_of

__all__ = ["Typing", "TypingError", "is_zero", "run_typed", "type_of"]
