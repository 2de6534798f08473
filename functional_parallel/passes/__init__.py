"""Rewrites of a program that a plan asks for: what is recomputed, when parameters are gathered, how sums are batched.

A `ProgramPass` is a value with a `name`, a place in the `order`, and `run(traced, mesh)`, which rewrites the graph in
place and leaves its meaning as it was. Transforms put passes into a function's layout; `fp.compile` runs them.
"""

from .added_products import add_products_in_place
from .base import LookingAhead, ProgramPass, finished, named, run_passes
from .buckets import Buckets
from .budget import BudgetError, RematWithin
from .casts import NarrowGathers
from .cheap import CheapAgain, CheapValues
from .gathers import Gathers
from .in_place import InPlace
from .layers import fold_layers
from .microbatches import (
    CASTS,
    ReduceEach,
    Rounds,
    SumsOnce,
    combined_by,
    end_one_microbatch,
    local_aval,
    microbatch_dim,
    names_axis,
    parts_of,
    resized,
    shortened,
    unroll,
)
from .reduce_types import ReduceIn
from .reductions import Reductions
from .remat import Marked, Remat
from .shards_first import ShardsFirst
from .trivial import drop_trivial
from .turned import Turned
from .views import fuse_views

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
    "CASTS",
    "NAMES",
    "Buckets",
    "BudgetError",
    "CheapAgain",
    "CheapValues",
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
    "Rounds",
    "ShardsFirst",
    "SumsOnce",
    "Turned",
    "add_products_in_place",
    "combined_by",
    "drop_trivial",
    "end_one_microbatch",
    "finished",
    "fold_layers",
    "fuse_views",
    "local_aval",
    "microbatch_dim",
    "named",
    "names_axis",
    "parts_of",
    "resized",
    "run_passes",
    "shortened",
    "unroll",
]
