"""Merge equal ops, and remove ops that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sharding_specs import Mesh

from ..ir import Traced, forget_values, simplify
from .program_pass import Phase, ProgramPass


@dataclass(frozen=True)
class Simplified(ProgramPass):
    """Merge equal ops, remove identities, and compute no value if only its shape is read."""

    name: ClassVar[str] = "simplify"
    phase: ClassVar[Phase] = Phase.PREPARE
    is_implied: ClassVar[bool] = True
    is_required: ClassVar[bool] = True  # a value with only its shape read may be a sum over all microbatches

    def run(self, traced: Traced, mesh: Mesh) -> None:
        simplify(forget_values(traced))
