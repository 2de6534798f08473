"""The passes in the order in which they run. Names, phases and the page docs/passes.md come from this table."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Phase, ProgramPass
from .buckets import Buckets
from .budget import RematToBudget
from .casts import CastBeforeGather, WidenedAndNarrowed
from .cheap import RecomputeCheap
from .gathers import GatherPlacement
from .in_place import InPlaceUpdates
from .microbatches.sums_once import ReduceOncePerStep, ReducePerMicrobatch
from .reduce_types import ReduceDtype
from .reductions import EarlyReductions
from .remat import RecomputeMarked, Remat
from .shards_first import ReduceScatterFirst
from .transposed import TransposedGradients

PASSES: tuple[tuple[type[ProgramPass], str], ...] = (  # with the transform or option that requests it
    (ReduceOncePerStep, "microbatches"),
    (ReduceScatterFirst, "several data axes"),
    (CastBeforeGather, "`mixed_precision`"),
    (ReduceDtype, "`mixed_precision`"),
    (WidenedAndNarrowed, "`mixed_precision`"),
    (ReducePerMicrobatch, '`accumulate(reduce="each")`'),
    (RecomputeMarked, "every program"),
    (Remat, "`remat`"),
    (RematToBudget, "`remat(budget=…)`"),
    (TransposedGradients, "every program"),
    (GatherPlacement, "`zero(3, …)`"),
    (EarlyReductions, "every program"),
    (RecomputeCheap, "every program"),
    (Buckets, "`bucket=`"),
    (InPlaceUpdates, "donated state"),
)
PASS_NAMES = frozenset(each.name for each, _ in PASSES)
_POSITION = {each: number for number, (each, _) in enumerate(PASSES)}


def sorted_passes(passes: Iterable[ProgramPass]) -> list[ProgramPass]:
    """Return passes in the order of the table; a pass that is missing from it is the last of its phase."""
    return sorted(passes, key=lambda each: (each.phase, _POSITION.get(type(each), len(PASSES))))


def split_at(phase: Phase, passes: Iterable[ProgramPass]) -> tuple[list[ProgramPass], list[ProgramPass]]:
    """Return the passes that run before a phase, and the others."""
    given = list(passes)
    return [each for each in given if each.phase < phase], [each for each in given if each.phase >= phase]
