"""Costs of recomputing a value, and of storing it in another form."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from sharding_specs import Mesh

from ..ir import NodeInfo, Traced, info
from ..program import Hardware, memories_of, readable_seconds, recompute_cost, seconds_of
from .stored_residuals import StoredResiduals, there_and_back


@dataclass(frozen=True)
class Way:
    """What becomes of a residual that is not saved."""

    form: StoredResiduals | None = None  # form of the stored value; None if it is recomputed
    kept: int = 0  # bytes of its parts on the device
    cost: float = 0.0  # of the conversion and back


@dataclass(frozen=True)
class ChoiceCosts:
    """Costs on a machine, in seconds; without one, in flops at fixed rates."""

    mesh: Mesh
    hardware: Hardware | None
    forms: Sequence[StoredResiduals]

    def of_ops(self, traced: Traced) -> Callable[[fx.Node], float]:
        if self.hardware is None:
            return functools.partial(recompute_cost, mesh=self.mesh)
        return functools.partial(seconds_of, mesh=self.mesh, hardware=self.hardware, memories=memories_of(traced))

    def ways(self, values: Sequence[fx.Node]) -> Mapping[fx.Node, Sequence[Way]]:
        """Return the possible stored forms of each value."""
        found, known = defaultdict[fx.Node, list[Way]](list), dict[object, Way]()
        for form in self.forms:
            for value in form.chosen(values, self.mesh):
                key = form, info(value).aval, tuple(info(value).typed.items())
                if key not in known:
                    known[key] = self._way(form, info(value))
                found[value].append(known[key])
        return found

    def _way(self, form: StoredResiduals, like: NodeInfo) -> Way:
        body, kept = there_and_back(form, like, self.mesh)
        return Way(form, kept, sum(map(self.of_ops(body), body.nodes)))

    def readable(self, cost: float) -> str:
        return f"{cost / 1e6:.3g} Mflop" if self.hardware is None else readable_seconds(cost)
