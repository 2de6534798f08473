"""Domains of schedules. For an argument outside the domain, the error names the rule and the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ScheduleError


def require(name: str, rule: str, argument: str, value: int, legal: Callable[[int], bool], others: str = "") -> None:
    if isinstance(value, int) and value >= 1 and legal(value):
        return
    start = int(value) if value >= 1 else 0
    below = next((number for number in range(start - 1, 0, -1) if legal(number)), None)
    above = next((number for number in range(start + 1, 4 * start + 1000) if legal(number)), None)
    nearest = " and ".join(str(number) for number in (below, above) if number is not None)
    given = f"{argument}={value}" + (f" with {others}" if others else "")
    raise ScheduleError(f"{name} takes {rule}; got {given}, and the nearest that it takes: {argument}={nearest}")


def ranks_of(name: str, stages: int, microbatches: int, chunks: int = 1) -> int:
    require(name, "at least 1 stage per rank", "chunks", chunks, lambda _: True)
    rule = "a number of stages that is a multiple of the chunks per rank" if chunks > 1 else "at least 1 stage"
    require(name, rule, "stages", stages, lambda number: number % chunks == 0, f"chunks={chunks}" if chunks > 1 else "")
    require(name, "at least 1 microbatch", "microbatches", microbatches, lambda _: True)
    return stages // chunks
