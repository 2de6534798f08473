"""Passes that a plan requests: recomputation, positions of gathers, buckets of sums.

A `ProgramPass` has a `name`, a `phase` that it runs in, and `run(traced, mesh)`, which rewrites the graph in place and
leaves its meaning unchanged. Transforms add passes to a function's layout. Lowering runs them in the order of
`table`.
"""

from .buckets import Buckets
from .budget import RematToBudget
from .casts import CastBeforeGather, WidenedAndNarrowed
from .cheap import RecomputeCheap
from .compressed import WireFormats
from .early_reductions import EarlyReductions
from .gather_again import GatherAgain
from .gathers import GatherPlacement
from .host_moves import HostMoves
from .in_place import WRITES_IN_PLACE, InPlaceUpdates
from .microbatches.rounds import MicrobatchRounds, names_axis
from .microbatches.split import microbatch_splits, shard_aval
from .microbatches.sums_on_host import SumsOnHost
from .microbatches.sums_once import ReduceOncePerStep, ReducePerMicrobatch
from .microbatches.unroll import bounds_of_part, combine_op, microbatch_dim, with_dim_size, with_global_size
from .moved_residuals import MovedResiduals
from .options import REPEATS, Options, pass_names
from .parameter_moves import ParameterMoves
from .program_pass import (
    Chosen,
    Completed,
    Pack,
    Phase,
    ProgramPass,
    RunningSum,
    Scope,
    Settings,
    StagedOps,
    Unit,
    Unpack,
    run_pass,
)
from .reduce_types import ReduceDtype
from .rematerialize import RecomputeMarked, Remat
from .running_sums import lying_by_themselves
from .shards_first import ReduceScatterFirst
from .split_residuals import SplitResiduals
from .stored_residuals import StoredResiduals, call_inline, next_op, on_device, restore
from .table import passes_of
from .transposed import TransposedGradients
from .update_groups import UpdateGroups
