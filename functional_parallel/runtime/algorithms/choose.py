"""Select the algorithm of a collective by a fixed rule, so that two runs select the same one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from .algorithm_group import AlgorithmGroup
from .model import COLLECTIVE_KINDS, MeasuredCosts, algorithm_cost, measure_group
from .table import ALGORITHMS, Algorithm

__all__ = ["VARIABLE", "AlgorithmSelector", "requested_algorithm"]

VARIABLE = "FUNCTIONAL_PARALLEL_ALGORITHM"
SIZES = tuple(1 << power for power in (10, 14, 18, 22, 26))


def requested_algorithm(given: str | None, ordered: bool) -> str:
    """Return the requested algorithm: the argument, else the environment variable, else "auto".

    >>> requested_algorithm("ring", ordered=False)
    'ring'

    Args:
        given: the argument.
        ordered: whether sums must be in rank order.

    Raises:
        ValueError: if the name is unknown, or if `ordered` is set and the algorithm does not add in rank order.
    """
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


_REASONS = {
    "shared": "its ranks share memory",
    "two_level": "each host has as many ranks",
    "direct": "adds in rank order",
    "backend": "no other applies",
}


class AlgorithmSelector:
    """Selects the algorithms of one group.

    Args:
        team: the ranks.
        setting: "auto", or the name of an algorithm.
        ordered: whether sums must be in rank order.
        measuring: creates the context of the collectives that measure costs.

    Raises:
        ValueError: if this group cannot use the requested algorithm.
    """

    def __init__(
        self,
        team: AlgorithmGroup,
        setting: str,
        ordered: bool,
        measuring: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.team, self.ordered, self._measuring = team, ordered, measuring
        self._forced = ALGORITHMS.get(setting)
        if self._forced is not None and (reason := self._forced.refuses(team)):
            raise ValueError(f"algorithm={setting!r} (or {VARIABLE}) cannot be used here: {reason}; write 'auto'")
        self._machine: MeasuredCosts | None = None
        self._selected: dict[str, Algorithm | None] = {}

    @property
    def machine(self) -> MeasuredCosts:
        """The measured costs of this group, which `table` prints. The first access is a collective."""
        if self._machine is None:
            with self._measuring():
                self._machine = measure_group(self.team)
        return self._machine

    def choose(self, kind: str) -> Algorithm | None:
        """Select the algorithm for a kind of collective. None selects the backend's own collective."""
        if kind not in self._selected:
            self._selected[kind] = self._forced or ALGORITHMS.get(self._by_rule(kind))
        return self._selected[kind]

    def _by_rule(self, kind: str) -> str:
        for name in ("shared", "two_level"):
            algorithm = ALGORITHMS[name]
            has_kind = kind != "all_to_all" or algorithm.all_to_all is not None
            if has_kind and algorithm.refuses(self.team) is None and self._may_add(name, kind):
                return name
        return "direct" if self._must_add(kind) and kind == "all_reduce" else "backend"

    def _may_add(self, name: str, kind: str) -> bool:
        return ALGORITHMS[name].is_ordered or not self._must_add(kind)

    def predictions(self, kind: str, size: int) -> dict[str, float]:
        """Return predicted seconds of each usable algorithm, by name. An ordered all_reduce has no "backend"."""
        found = {}
        for name, algorithm in ALGORITHMS.items():
            work = algorithm_cost(name, kind, self.team.size, len(self.team.hosts), size)
            if work and not algorithm.refuses(self.team) and self._may_add(name, kind):
                line = self.machine.whole.get((name, kind))
                found[name] = line.seconds(size) if line else work.seconds(size, self.machine)
        if not (self._must_add(kind) and kind == "all_reduce"):
            found["backend"] = self.machine.whole["backend", kind].seconds(size)
        return found

    def _must_add(self, kind: str) -> bool:
        return self.ordered and kind in ("all_reduce", "reduce_scatter")

    def table(self, sizes: Sequence[int] = SIZES) -> str:
        """Return predicted milliseconds by collective, size and algorithm, and the selected algorithm.

        The first call measures the group. Every rank must make it.

        Args:
            sizes: sizes in bytes.
        """
        machine, team = self.machine, self.team
        lines = [
            f"{team.size} ranks on {len(team.hosts)} host{'s' * (len(team.hosts) > 1)}",
            f"{'a message':24} {machine.message}, {1e6 * machine.further:.0f} µs for each further one of a round",
            f"{'shared memory':24} {machine.memory or ('none' if team.has_hosts_alike else 'not used')}",
            *(f"{f'{name} {kind}':24} {line}" for (name, kind), line in sorted(machine.whole.items())),
            "",
        ]
        names = [*(name for name, each in ALGORITHMS.items() if not each.refuses(team)), "backend"]
        rows = [("milliseconds", "bytes", *names, "chosen", "because")]
        for kind in COLLECTIVE_KINDS:
            for size in sizes:
                times = self.predictions(kind, size)
                cells = (f"{1000 * times[name]:.3f}" if name in times else "–" for name in names)
                rows.append((kind, _bytes(size), *cells, *self._reason(kind)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join(lines)

    def _reason(self, kind: str) -> tuple[str, str]:
        if self._forced is not None:
            return self._forced.name, "asked for"
        return self._by_rule(kind), _REASONS[self._by_rule(kind)]


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
