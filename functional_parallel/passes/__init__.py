"""Rewrites of a program that a plan asks for: what is recomputed, when parameters are gathered, how sums are batched.

A `ProgramPass` is a value with a `name`, a place in the `order`, and `run(traced, mesh)`, which rewrites the graph in
place and leaves its meaning as it was. Transforms put passes into a function's layout; `fp.compile` runs them.
"""

from .added_products import fuse_matmul_accumulate
from .base import LookaheadPass, ProgramPass, finished, pass_names, run_passes
from .buckets import Buckets
from .budget import BudgetError, RematToBudget
from .casts import CastBeforeGather
from .cheap import CheapValues, RecomputeCheap
from .gathers import GatherPlacement
from .in_place import InPlaceUpdates
from .microbatches import (
    CASTS,
    MicrobatchRounds,
    ReduceOncePerStep,
    ReducePerMicrobatch,
    combine_op,
    microbatch_dim,
    microbatch_splits,
    names_axis,
    place_single_microbatch_sums,
    shard_aval,
    unroll,
    with_dim_size,
    with_global_size,
)
from .reduce_types import ReduceDtype
from .reductions import EarlyReductions
from .remat import RecomputeMarked, Remat
from .shards_first import ReduceScatterFirst
from .stacked_layers import fold_layers
from .transposed import TransposedGradients
from .trivial import drop_size_one_axes
from .views import fuse_views

PASS_NAMES = frozenset(
    each.name
    for each in (
        Buckets,
        RecomputeCheap,
        GatherPlacement,
        InPlaceUpdates,
        RecomputeMarked,
        CastBeforeGather,
        ReducePerMicrobatch,
        ReduceDtype,
        EarlyReductions,
        Remat,
        ReduceScatterFirst,
        ReduceOncePerStep,
        TransposedGradients,
    )
)

__all__ = [
    "CASTS",
    "PASS_NAMES",
    "Buckets",
    "BudgetError",
    "CastBeforeGather",
    "CheapValues",
    "EarlyReductions",
    "GatherPlacement",
    "InPlaceUpdates",
    "LookaheadPass",
    "MicrobatchRounds",
    "ProgramPass",
    "RecomputeCheap",
    "RecomputeMarked",
    "ReduceDtype",
    "ReduceOncePerStep",
    "ReducePerMicrobatch",
    "ReduceScatterFirst",
    "Remat",
    "RematToBudget",
    "TransposedGradients",
    "combine_op",
    "drop_size_one_axes",
    "finished",
    "fold_layers",
    "fuse_matmul_accumulate",
    "fuse_views",
    "microbatch_dim",
    "microbatch_splits",
    "names_axis",
    "pass_names",
    "place_single_microbatch_sums",
    "run_passes",
    "shard_aval",
    "unroll",
    "with_dim_size",
    "with_global_size",
]
