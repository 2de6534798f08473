"""A program: a flat graph of aten ops and named collectives, with the mesh it is for; typed, printable, countable."""

from .base import BaseProgram
from .collectives import COMMUNICATING, Collective, collectives_of
from .explain import Explanation
from .hardware import Hardware
from .links import Line
from .passes import BudgetError
from .price import Price
from .program import Program
from .trivial import drop_trivial

__all__ = [
    "COMMUNICATING",
    "BaseProgram",
    "BudgetError",
    "Collective",
    "Explanation",
    "Hardware",
    "Line",
    "Price",
    "Program",
    "collectives_of",
    "drop_trivial",
]
