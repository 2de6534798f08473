"""What users test with: equivalence of a plan with the plain function, equality of two local programs, strategies."""

from .equivalence import NotEquivalentError, assert_equivalent
from .same import assert_same

__all__ = ["NotEquivalentError", "assert_equivalent", "assert_same"]
