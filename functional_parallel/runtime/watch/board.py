"""State of all ranks as known to rank 0, and the reasons to end waits; what only delays others is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..calls import SAME_CALLS, Lost

_OUT_OF_STEP = ("CallMismatchError", "ReentrantCallError")
_GRACE = 3.0  # seconds that a rank waits on a rank that is gone: its message may be in flight


@dataclass
class _WatchedRank:
    arrived: bool = False
    gone: float | None = None  # time of its end
    left: int | None = None  # number of calls it had made
    failed: dict[int, str] = field(default_factory=dict)
    position: dict[str, Any] | None = None
    since: float = 0.0  # time when the position arrived


class Board:
    def __init__(self, size: int) -> None:
        self._ranks = [_WatchedRank() for _ in range(size)]

    def missing(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if not rank.arrived]

    def arrives(self, rank: int) -> None:
        self._ranks[rank].arrived = True

    def ends(self, rank: int, now: float) -> None:
        if self._ranks[rank].gone is None:
            self._ranks[rank].gone = now

    def has_left(self, rank: int) -> bool:
        return self._ranks[rank].left is not None

    def leaves(self, rank: int, calls: int) -> None:
        self._ranks[rank].left = calls

    def waits(self, rank: int, position: dict[str, Any] | None, now: float) -> None:
        self._ranks[rank].position, self._ranks[rank].since = position, now

    def fails(self, rank: int, call: int, error: str) -> None:
        self._ranks[rank].failed[call] = error

    def judge(self, now: float) -> Lost | None:
        waiting = [rank for rank in self._ranks if rank.position is not None]
        for rank in waiting:
            if reason := self._waits_in_vain(rank, now):
                return reason
        for index, first in enumerate(waiting):
            for second in waiting[:index]:
                if reason := _mismatch(second.position or {}, first.position or {}):
                    return reason
        return None

    def _waits_in_vain(self, rank: _WatchedRank, now: float) -> Lost | None:
        assert rank.position is not None
        call = rank.position["count"]
        for number in rank.position["ranks"]:
            other = self._ranks[number]
            if other.gone is not None and now - max(other.gone, rank.since) > _GRACE:
                return Lost("")
            if other.left is not None and other.left < call:
                return Lost(after_leaving(number, other.left, _says(rank.position)))
            if call in other.failed and other is not rank:
                call_differs = other.failed[call].startswith(_OUT_OF_STEP)
                gone = [each for each in self._ranks if each.gone is not None]
                told = f"rank <{number}> left this call by an error, {other.failed[call]}, and {_says(rank.position)}"
                return Lost("" if gone else told, call_differs)
        return None


def after_leaving(rank: int, calls: int, waits: str) -> str:
    return (
        f"rank <{rank}> has let the processes go after its call {calls}, at the end of its program or by "
        f"destroy_process_group, and {waits}. {SAME_CALLS}"
    )


def _mismatch(one: dict[str, Any], other: dict[str, Any]) -> Lost | None:
    calls, others = _numbered(one), _numbered(other)
    number = next((n for n in sorted(calls.keys() & others.keys()) if calls[n] != others[n]), None)
    if number is None:
        return None
    first = f" Their calls differ from call {number} on: {one['me']} {calls[number]}, {other['me']} {others[number]}."
    if number == max(one["count"], other["count"]):
        first = ""
    text = f"the ranks are doing different things: {_says(one)}; {_says(other)}.{first} {SAME_CALLS}"
    return Lost(text, out_of_step=True)


def _numbered(position: dict[str, Any]) -> dict[int, str]:
    calls = position["calls"]
    return dict(zip(range(position["count"] - len(calls) + 1, position["count"] + 1), calls, strict=True))


def _says(position: dict[str, Any]) -> str:
    call = position["calls"][-1] if position["calls"] else "starts"
    place = f" and waits in {position['place']}" if position["place"] else ""
    return f"{position['me']} {call} (its call {position['count']}){place}"
