"""Public test helpers: equivalence of a plan with the plain function, equality of two local programs, strategies."""

import importlib
from types import ModuleType

from .elementwise_update import assert_elementwise
from .equivalence import assert_equivalent
from .rule_check import check_rule
from .same import assert_same
from .same_logits import same_logits

__all__ = ["assert_elementwise", "assert_equivalent", "assert_same", "check_rule", "same_logits", "strategies"]


def __getattr__(name: str) -> ModuleType:
    """Load `strategies` on first access, because only that module needs hypothesis."""
    if name == "strategies":
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
