"""Which algorithm a collective goes by."""

from __future__ import annotations

import os

from .table import ALGORITHMS, Algorithm
from .team import Team

__all__ = ["VARIABLE", "Chooser", "setting"]

VARIABLE = "FUNCTIONAL_PARALLEL_ALGORITHM"


def setting(given: str | None, ordered: bool) -> str:
    """What was asked for: an argument, else the environment variable, else "auto".

    Raises:
        ValueError: for an unknown name, or one that does not add in rank order where sums must.
    """
    name = given or os.environ.get(VARIABLE) or "auto"
    known = ["auto", "backend", *ALGORITHMS]
    if name not in known:
        raise ValueError(f"algorithm={name!r} (or {VARIABLE}): write one of {', '.join(map(repr, known))}")
    if ordered and name in ALGORITHMS and not ALGORITHMS[name].is_ordered:
        able = [each.name for each in ALGORITHMS.values() if each.is_ordered]
        raise ValueError(
            f"reduction='ordered' adds in rank order, which algorithm={name!r} (or {VARIABLE}) does not; "
            f"write one of {', '.join(map(repr, ['auto', 'backend', *able]))}"
        )
    return name


class Chooser:
    """Chooses for one team.

    Args:
        team: the ranks.
        setting: "auto", or the name of an algorithm.
        ordered: whether sums must be in rank order.

    Raises:
        ValueError: when the algorithm that was asked for cannot serve this team.
    """

    def __init__(self, team: Team, setting: str, ordered: bool) -> None:
        self.team, self.ordered = team, ordered
        self._forced = ALGORITHMS.get(setting)
        if self._forced is not None and (reason := self._forced.refuses(team)):
            raise ValueError(f"algorithm={setting!r}: {reason}; write 'auto'")

    def choose(self, kind: str, size: int) -> Algorithm | None:
        """The algorithm for a collective of this many bytes; None is the backend's own."""
        if self._forced is not None:
            return self._forced
        shared = ALGORITHMS["shared"]
        if shared.refuses(self.team) is None:
            return shared
        return ALGORITHMS["direct"] if kind != "all_reduce" or self.ordered else None
