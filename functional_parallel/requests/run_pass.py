"""Request of a pass over the compiled program, in a scope."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sharding_specs import Mesh

from ..functions import Layout, Request
from ..ir import Traced
from ..passes import ProgramPass


class Scope(Enum):
    """Programs that a requested pass runs on. Without a pipeline there is one program, and all scopes are the step."""

    STEP = "step"  # the whole step; in a pipeline before it is cut
    STAGE = "stage"  # each program after the cut: of the stages, before them and after them
    PAIR = "pair"  # the programs of a stage's forward and backward together


class PairPass(ProgramPass):
    """Pass over forward and backward programs of a pipeline stage together. It keeps their inputs and outputs."""

    @abstractmethod
    def run_pair(self, programs: Sequence[Traced], mesh: Mesh) -> None:
        """Rewrite the programs of one stage in place, the forward first."""

    def run(self, traced: Traced, mesh: Mesh) -> None:
        self.run_pair((traced,), mesh)


@dataclass(frozen=True)
class RunPass(Request):
    """Request to run a pass on the programs of a scope. Its phase orders it among the passes of the scope."""

    run: ProgramPass
    scope: Scope = Scope.STEP

    def __str__(self) -> str:
        where = {Scope.STEP: "", Scope.STAGE: " on each stage", Scope.PAIR: " on forward and backward of each stage"}
        return f"pass {self.run.name!r}{where[self.scope]}"


def requested_passes(layout: Layout, *scopes: Scope) -> list[ProgramPass]:
    """Return the requested passes of some scopes, all by default."""
    return [each.run for each in layout.all(RunPass) if not scopes or each.scope in scopes]
