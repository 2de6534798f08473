"""The passes in order of execution. Names, phases and the page docs/passes.md come from this table."""

from __future__ import annotations

from .added_products import AddedProducts
from .buckets import Buckets
from .budget import RematToBudget
from .casts import CastBeforeGather, WidenedAndNarrowed
from .cheap import RecomputeCheap
from .compressed import Compressed, WireFormats
from .early_reductions import EarlyReductions
from .folded_products import FoldedProducts
from .fused_views import FusedViews
from .gather_again import GatherAgain
from .gathers import GatherPlacement
from .host_moves import HostMoves
from .in_place import InPlaceUpdates
from .microbatches.one_microbatch import SumsOfOneMicrobatch
from .microbatches.sequential import SequentialMicrobatches
from .microbatches.sums_on_host import SumsOnHost
from .microbatches.sums_once import ReduceOncePerStep, ReducePerMicrobatch
from .microbatches.unroll import UnrollMicrobatches
from .moved_residuals import MovedResiduals
from .options import REPEATS
from .parameter_moves import ParameterMoves
from .program_pass import ProgramPass, Settings
from .reduce_types import ReduceDtype
from .rematerialize import RecomputeMarked, Remat
from .running_sums import RunningSums
from .shards_first import ReduceScatterFirst
from .simplified import Simplified
from .split_residuals import SplitResiduals
from .stacked_layers import SeparateLayers
from .stored_residuals import RecomputeFromStored
from .transposed import TransposedGradients
from .trivial import AxesOfOneRank
from .update_groups import UpdateGroups

PASSES: tuple[tuple[type[ProgramPass], str], ...] = (  # with the transform or option that requests it
    (AxesOfOneRank, "every program"),
    (Simplified, "every program"),
    (ReduceOncePerStep, "microbatches"),
    (ReduceScatterFirst, "several data axes"),
    (CastBeforeGather, "`mixed_precision`"),
    (ReduceDtype, "`mixed_precision`"),
    (WidenedAndNarrowed, "`mixed_precision`"),
    (ReducePerMicrobatch, '`accumulate(reduce="each")`'),
    (SumsOnHost, "`offload(gradients=…)`"),
    (UnrollMicrobatches, "`accumulate`"),
    (SumsOfOneMicrobatch, "`pipeline(…, microbatches=1)`"),
    (SeparateLayers, "`pipeline`"),
    (SequentialMicrobatches, "`pipeline`"),
    (RecomputeMarked, "every program"),
    (GatherAgain, "`tensor_parallel`"),
    (Remat, "`remat`"),
    (RematToBudget, "`remat(budget=…)`"),
    (RecomputeFromStored, "residuals that are stored in another form"),
    (SplitResiduals, "`partition_activations`"),
    (MovedResiduals, "`offload(activations=…)`"),
    (TransposedGradients, "every program"),
    (GatherPlacement, "`zero(3, …)`"),
    (ParameterMoves, "`offload(parameters=…)`"),
    (EarlyReductions, "every program"),
    (RecomputeCheap, "every program"),
    (WireFormats, "`compress`"),
    (Buckets, "`bucket=`"),
    (HostMoves, "`offload`"),
    (UpdateGroups, "`offload`"),
    (InPlaceUpdates, "donated state"),
    (RunningSums, "`pipeline`"),
    (AddedProducts, "donated state, `pipeline`"),
    (FoldedProducts, "every program"),
    (FusedViews, "every program"),
    (Compressed, "`compress`"),
)
_POSITION = {each: number for number, (each, _) in enumerate(PASSES)}


def passes_of(settings: Settings) -> list[ProgramPass]:
    """Return the passes of a step in order: the passes of every step, and requested passes, except those left out.

    A requested pass that is missing from the table is the last of its phase.

    Raises:
        ValueError: if the options leave out a pass that does not exist, or that programs need.
    """
    implied = [each for kind, _ in PASSES for each in kind.implied(settings)]
    chosen = dict.fromkeys([*implied, *settings.requested])
    _require_optional(settings)
    kept = [each for each in chosen if each.name not in settings.options.without]
    return sorted(kept, key=lambda each: (each.phase, _POSITION.get(type(each), len(PASSES))))


def _require_optional(settings: Settings) -> None:
    kinds: list[type[ProgramPass]] = [*(kind for kind, _ in PASSES), *map(type, settings.requested)]
    optional = sorted({REPEATS, *(kind.name for kind in kinds if not kind.is_required)})
    unknown = sorted(settings.options.without.difference(optional))
    if unknown:
        raise ValueError(
            f"without={unknown}: no passes that can be left out; these can: {', '.join(map(repr, optional))}"
        )
