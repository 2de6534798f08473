"""Request of a pass over the compiled program."""

from __future__ import annotations

from dataclasses import dataclass

from ..functions import Applied, Request
from ..passes import ProgramPass, Scope


@dataclass(frozen=True)
class RunPass(Request):
    run: ProgramPass

    def __str__(self) -> str:
        scope = self.run.scope
        return f"pass {self.run.name!r}{'' if scope is Scope.STEP else f' on each {scope.value}'}"


def requested_passes(applied: Applied) -> tuple[ProgramPass, ...]:
    return tuple(each.run for each in applied.all(RunPass))
