"""All schedules by name, with their domain, bubble, peak memory and publication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ScheduleError
from .actions import Schedule
from .automatic import zb_auto
from .dualpipe import dualpipe, dualpipe_v
from .interleaved import breadth_first, interleaved
from .one_stage import eager_one_f_one_b, gpipe, naive, one_f_one_b
from .pipedream import pipedream, two_bw
from .v_shape import v_half, v_min
from .zero_bubble import zb_h1, zb_h2, zb_v


class Family(NamedTuple):
    """A rule that builds schedules.

    Args:
        schedule: a function of stages and microbatches.
        domain: the legal arguments, for P ranks, M microbatches and V chunks per rank.
        bubble: idle time of a rank. F, I and W are the times of the actions of a stage, and B = I + W.
        peak: maximum number of forwards with live activations on rank r.
        paper: the publication.
        chunks: number of stages per rank, or None if the argument `chunks` of the function determines it.
    """

    schedule: Callable[..., Schedule]
    domain: str
    bubble: str
    peak: str
    paper: str
    chunks: int | None = 1


_PIPEDREAM = "Narayanan et al. 2019, PipeDream"
_FLUSH = "Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training"
_ZERO = "Qi et al. 2024, Zero bubble pipeline parallelism"
_MEMORY = "Qi et al. 2024, Pipeline parallelism with controllable memory"
_DUAL = "DeepSeek-AI 2024, DeepSeek-V3 technical report"
_DUAL_V = f"{_DUAL}; its published code"
_BREADTH = "Lamy-Poirier 2023, Breadth-first pipeline parallelism"

FAMILIES = {
    "naive": Family(naive, "any", "M(P − 1)(F + B)", "1", "layer-wise model parallelism"),
    "gpipe": Family(gpipe, "any", "(P − 1)(F + B)", "M", "Huang et al. 2019, GPipe"),
    "1f1b": Family(one_f_one_b, "any", "(P − 1)(F + B)", "min(P − r, M)", _FLUSH),
    "eager-1f1b": Family(eager_one_f_one_b, "any", "(P − 1)(F + B)", "min(2(P − r) − 1, M)", "a variant of 1F1B"),
    "interleaved": Family(
        interleaved,
        "P·V stages; M divisible by max(1, ⌊M/P⌋)",
        "(P − 1)(F + B)",
        "min(2(P − 1 − r) + (V − 1)P + 1, MV) if P divides M and V > 1",
        "Narayanan et al. 2021, Megatron-LM",
        None,
    ),
    "looped-bfs": Family(breadth_first, "P·V stages", "(P − 1)(F + B)", "MV", _BREADTH, None),
    "zb-h1": Family(zb_h1, "any", "(P − 1)(F + I − W) if W ≤ F, I and M ≥ 2P − 1", "min(P, M)", _ZERO),
    "zb-h2": Family(zb_h2, "any", "span (P − 1)(F + I − 2W), if W ≤ F, I and M ≥ 2P − 1", "min(2P − 1, M)", _ZERO),
    "zb-v": Family(
        zb_v,
        "2P stages",
        "(P − 1)max(I, 2(I − W)); span 2(P − 1)(I − W), if I ≥ F ≥ W",
        "min(2P, 2M) if M ≥ 2P − 1",
        _ZERO,
        2,
    ),
    "v-half": Family(
        v_half,
        "2P stages",
        "3P − 7 for even P ≥ 4, 3P − 4 for odd P ≥ 3, if F = I = W = 1 and M ≥ 2P",
        "2(⌊P/2⌋ + 1)",
        _MEMORY,
        2,
    ),
    "v-min": Family(
        v_min,
        "2P stages",
        "4P − 7 for P divisible by 3, else 4P − 5, if F = I = W = 1 and M ≥ 2P",
        "2⌈(P + 2)/3⌉",
        _MEMORY,
        2,
    ),
    "zb-auto": Family(zb_auto, "any; at most `limit` live", "by search", "≤ limit", _ZERO),
    "dualpipe": Family(dualpipe, "P even; M even, M ≥ 2P", "(P/2 − 1)(F&B + F − 2W) if F ≥ I ≥ W", "P + 1", _DUAL),
    "dualpipe-v": Family(dualpipe_v, "2P stages; M ≥ 2P", "(P − 1)(F&B + F − 2W) if F ≥ I ≥ W", "2P + 1", _DUAL_V, 2),
    "pipedream": Family(pipedream, "any", "0 while it streams", "min(P − r, M)", _PIPEDREAM),
    "2bw": Family(two_bw, "batches of at least P; M full batches", "0 while it streams", "min(P − r, M)", _FLUSH),
}
_ALIASES = {"bfs": "looped-bfs", "dualpipev": "dualpipe-v", "pipedream-2bw": "2bw", "pipedream-flush": "1f1b"}


def get(name: str) -> Callable[..., Schedule]:
    """Return the function that builds the schedule `name`.

    >>> from functional_parallel import schedules
    >>> schedules.get("zb-h1")(stages=4, microbatches=8)
    Schedule(zb-h1: 4 stages on 4 ranks, 8 microbatches)

    Args:
        name: a name in `FAMILIES` or an alias, such as "bfs" or "pipedream-flush". `zb_h1` is "zb-h1".

    Returns:
        A function of `stages` and `microbatches`. Some have more arguments. All arguments may be passed by keyword.

    Raises:
        ScheduleError: for an unknown name. The message lists the names.
    """
    return family(name).schedule


def family(name: str) -> Family:
    """Return the family of a name in `FAMILIES` or an alias. `_` counts as `-`, as in the names of functions."""
    dashed = str(name).replace("_", "-")
    found = FAMILIES.get(_ALIASES.get(dashed, dashed))
    if found is None:
        raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(FAMILIES)}")
    return found


def stages_for(name: str, ranks: int, chunks: int = 2) -> int:
    """Return the number of stages of a schedule on `ranks` ranks.

    >>> from functional_parallel import schedules
    >>> [schedules.stages_for(name, ranks=4, chunks=3) for name in ("1f1b", "interleaved", "zb-v")]
    [4, 12, 8]

    Args:
        name: a name in `FAMILIES` or an alias.
        ranks: number of ranks.
        chunks: number of stages per rank, for schedules that do not fix it.

    Returns:
        The number of stages of the model.
    """
    own = family(name).chunks
    return ranks * (chunks if own is None else own)


def for_ranks(name: str, ranks: int, microbatches: int, chunks: int = 2, **options: Any) -> Schedule:
    """Build the schedule `name` for a number of ranks. The number of stages follows from `stages_for`.

    >>> from functional_parallel import schedules
    >>> [schedules.for_ranks(name, ranks=2, microbatches=4, chunks=3) for name in ("1f1b", "interleaved")]
    [Schedule(1f1b: 2 stages on 2 ranks, 4 microbatches), Schedule(interleaved: 6 stages on 2 ranks, 4 microbatches)]

    Args:
        name: as for `get`.
        ranks: number of ranks.
        microbatches: number of microbatches per step.
        chunks: number of stages per rank, for schedules that do not fix it.
        options: additional arguments of the schedule, such as `limit` of "zb-auto".

    Returns:
        The schedule.

    Raises:
        ScheduleError: for an unknown name, or for arguments outside the domain of the schedule.
    """
    if family(name).chunks is None:
        options["chunks"] = chunks
    return get(name)(stages=stages_for(name, ranks, chunks), microbatches=microbatches, **options)
