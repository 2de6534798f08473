"""What a pass is, and running several."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced

__all__ = ["ProgramPass", "run_passes"]


class ProgramPass(Protocol):
    """A rewrite of a program's graph, in place."""

    @property
    def name(self) -> str: ...

    @property
    def order(self) -> int:
        """Passes run by ascending order: -1 chooses types, 0 recomputes, 1 places gathers, 2 merges collectives."""
        ...

    def per_microbatch(self, traced: Traced) -> Collection[fx.Node]:
        """Values that are the same for every microbatch, but shall be computed for each anew."""
        ...

    def run(self, traced: Traced, mesh: Mesh) -> None: ...


def run_passes(passes: Iterable[ProgramPass], traced: Traced, mesh: Mesh, without: Collection[str]) -> tuple[str, ...]:
    """Run the passes in their order, but for those that are switched off by name; the names of what ran."""
    chosen = {each: None for each in passes if each.name not in without}
    ordered = sorted(chosen, key=lambda each: each.order)
    for each in ordered:
        each.run(traced, mesh)
        traced.seal()
    return tuple(each.name for each in ordered)
