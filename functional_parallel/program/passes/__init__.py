"""Rewrites of a program that a plan asks for: what is recomputed, when parameters are gathered, how sums are batched.

A `ProgramPass` is a value with a `name`, a place in the `order`, and `run(traced, mesh)`, which rewrites the graph in
place and leaves its meaning as it was. Transforms put passes into a function's layout; `fp.compile` runs them.
"""

from .added_products import add_products_in_place
from .base import LookingAhead, ProgramPass, named, run_passes
from .buckets import Buckets
from .budget import BudgetError, RematWithin
from .casts import NarrowGathers
from .cheap import CheapAgain
from .gathers import Gathers
from .in_place import InPlace
from .microbatches import ReduceEach, SumsOnce
from .reduce_types import ReduceIn
from .reductions import Reductions
from .remat import Marked, Remat
from .shards_first import ShardsFirst
from .turned import Turned

NAMES = frozenset(
    each.name
    for each in (
        Buckets,
        CheapAgain,
        Gathers,
        InPlace,
        Marked,
        NarrowGathers,
        ReduceEach,
        ReduceIn,
        Reductions,
        Remat,
        ShardsFirst,
        SumsOnce,
        Turned,
    )
)

__all__ = [
    "NAMES",
    "Buckets",
    "BudgetError",
    "CheapAgain",
    "Gathers",
    "InPlace",
    "LookingAhead",
    "Marked",
    "NarrowGathers",
    "ProgramPass",
    "ReduceEach",
    "ReduceIn",
    "Reductions",
    "Remat",
    "RematWithin",
    "ShardsFirst",
    "SumsOnce",
    "Turned",
    "add_products_in_place",
    "named",
    "run_passes",
]
