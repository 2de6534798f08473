"""Passes that a plan requests: recomputation, positions of gathers, buckets of sums.

A `ProgramPass` has a `name`, a `phase` in which it runs, and `run(traced, mesh)`, which rewrites the graph in place and
leaves its meaning unchanged. Transforms add passes to a function's layout. Lowering runs them in the order of
`table`.
"""

from .added_products import fuse_matmul_accumulate
from .base import LookaheadPass, Phase, ProgramPass, finished, pass_names, run_passes
from .buckets import Buckets
from .budget import RematToBudget
from .casts import CastBeforeGather, WidenedAndNarrowed
from .cheap import CheapValues, RecomputeCheap
from .gathers import GatherPlacement
from .in_place import InPlaceUpdates
from .microbatches.one_microbatch import place_single_microbatch_sums
from .microbatches.rounds import CASTS, MicrobatchRounds, names_axis
from .microbatches.split import microbatch_splits, shard_aval
from .microbatches.sums_once import ReduceOncePerStep, ReducePerMicrobatch
from .microbatches.unroll import combine_op, microbatch_dim, unroll, with_dim_size, with_global_size
from .reduce_types import ReduceDtype
from .reductions import EarlyReductions
from .remat import RecomputeMarked, Remat
from .shards_first import ReduceScatterFirst
from .stacked_layers import fold_layers
from .table import PASS_NAMES, sorted_passes, split_at
from .transposed import TransposedGradients
from .trivial import drop_size_one_axes
from .views import fuse_views
