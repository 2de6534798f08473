"""Microbatches: split a batch, choose the ops that run per microbatch, unroll and sum them."""

from .one_microbatch import place_single_microbatch_sums
from .rounds import CASTS, MicrobatchRounds, names_axis
from .split import microbatch_splits, shard_aval
from .sums_once import ReduceOncePerStep, ReducePerMicrobatch
from .unroll import combine_op, microbatch_dim, unroll, with_dim_size, with_global_size

__all__ = [
    "CASTS",
    "MicrobatchRounds",
    "ReduceOncePerStep",
    "ReducePerMicrobatch",
    "combine_op",
    "microbatch_dim",
    "microbatch_splits",
    "names_axis",
    "place_single_microbatch_sums",
    "shard_aval",
    "unroll",
    "with_dim_size",
    "with_global_size",
]
