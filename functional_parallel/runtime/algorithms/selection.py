"""Selection of the algorithm of a collective by a fixed rule, so that two runs select the same one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .algorithm_group import AlgorithmGroup
from .table import ALGORITHMS, Algorithm

VARIABLE = "FUNCTIONAL_PARALLEL_ALGORITHM"
COLLECTIVE_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def requested_algorithm(given: str | None, ordered: bool) -> str:
    """Return the requested algorithm: the argument, else the environment variable, else "auto"."""
    name = given or os.environ.get(VARIABLE) or "auto"
    known = ["auto", "backend", *ALGORITHMS]
    if name not in known:
        raise ValueError(f"algorithm={name!r} (or {VARIABLE}): write one of {', '.join(map(repr, known))}")
    if ordered and name in ALGORITHMS and not ALGORITHMS[name].is_ordered:
        able = ["auto", "backend", *(each.name for each in ALGORITHMS.values() if each.is_ordered)]
        raise ValueError(
            f"reduction='ordered' adds in rank order, which algorithm={name!r} (or {VARIABLE}) does not; "
            f"write one of {', '.join(map(repr, able))}"
        )
    return name


@dataclass(frozen=True)
class Selection:
    """The algorithm of one kind of collective in a group, and the reason. None is the backend's own collective."""

    algorithm: Algorithm | None
    because: str


def select(team: AlgorithmGroup, setting: str, ordered: bool) -> dict[str, Selection]:
    """Select the algorithms of a group, by kind of collective. Sizes, dtypes and times have no influence."""
    forced = ALGORITHMS.get(setting)
    if forced is None:
        return {kind: _by_rule(team, kind, ordered) for kind in COLLECTIVE_KINDS}
    if reason := forced.refuses(team):
        raise ValueError(f"algorithm={setting!r} (or {VARIABLE}) cannot be used here: {reason}; write 'auto'")
    found = dict.fromkeys(COLLECTIVE_KINDS, Selection(forced, "asked for"))
    if forced.all_to_all is None:
        found["all_to_all"] = Selection(None, f"{setting} has no exchange")
    return found


def _by_rule(team: AlgorithmGroup, kind: str, ordered: bool) -> Selection:
    must_add_in_order = ordered and kind in ("all_reduce", "reduce_scatter")
    shared, two_level = ALGORITHMS["shared"], ALGORITHMS["two_level"]
    if shared.refuses(team) is None:
        return Selection(shared, "its ranks share memory")
    if two_level.refuses(team) is None and kind != "all_to_all" and not must_add_in_order:
        return Selection(two_level, "each host has as many ranks")
    if must_add_in_order and kind == "all_reduce":  # the backend's own reduce_scatter is an exchange and an ordered sum
        return Selection(ALGORITHMS["direct"], "adds in rank order")
    return Selection(None, "no other applies")
