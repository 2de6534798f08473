"""Microbatches: how a batch is cut, which ops run per microbatch, how they are unrolled and summed."""

from .one_microbatch import end_one_microbatch
from .rounds import CASTS, Rounds, names_axis
from .split import local_aval, parts_of
from .sums_once import ReduceEach, SumsOnce
from .unroll import combined_by, microbatch_dim, resized, shortened, unroll

__all__ = [
    "CASTS",
    "ReduceEach",
    "Rounds",
    "SumsOnce",
    "combined_by",
    "end_one_microbatch",
    "local_aval",
    "microbatch_dim",
    "names_axis",
    "parts_of",
    "resized",
    "shortened",
    "unroll",
]
