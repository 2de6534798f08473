"""Every schedule over its domain, drawn at random or listed."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import FAMILIES, Schedule

CHUNKED = [name for name, family in FAMILIES.items() if family.chunks is None]
made = schedules.for_ranks


def in_domain(name: str, ranks: int, microbatches: int) -> bool:
    """Written from the published rules, not from the code that checks them."""
    if name == "dualpipe":
        return ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks
    if name == "dualpipe-v":
        return microbatches >= 2 * ranks
    if name == "interleaved":
        return microbatches < 2 * ranks or microbatches % (microbatches // ranks) == 0
    if name == "2bw":
        return microbatches % ranks == 0
    return True


def everywhere(name: str) -> Iterator[tuple[int, int, int]]:
    """Ranks 1 to 8, microbatches 1 to 16, chunks 1 to 3, in the domain and out of it."""
    for ranks in range(1, 9):
        for microbatches in range(1, 17):
            for chunks in (1, 2, 3) if name in CHUNKED else (1,):
                yield ranks, microbatches, chunks


@st.composite
def drawn(draw: st.DrawFn, least_ranks: int = 1) -> Schedule:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    ranks, microbatches = draw(st.integers(least_ranks, 8)), draw(st.integers(1, 16))
    try:
        return made(name, ranks, microbatches, draw(st.integers(1, 3)))
    except ScheduleError:  # outside the domain; a schedule without one stands in
        return made("zb-h1", ranks, microbatches)
