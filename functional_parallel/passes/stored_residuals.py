"""Store values for the backward in another form: converted, split over ranks, or in another memory.

The forward converts a value just after it was computed, and the backward converts it back just before its first use.
Between them only the converted parts are alive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from sharding_specs import Mesh

from ..checker import Typing
from ..collectives import bind
from ..ir import NodeInfo, Traced, info, residuals
from ..program import view_base
from ..tracing import trace
from .program_pass import Phase, ProgramPass, Scope, Settings, Unit
from .recompute import insert_recompute


class StoredResiduals(ProgramPass):
    """Store residuals in another form, given by two functions on tensors. They may call collectives."""

    phase: ClassVar[Phase] = Phase.RESIDUALS
    scope: ClassVar[Scope] = Scope.PAIR

    @abstractmethod
    def is_chosen(self, value: fx.Node) -> bool:
        """Whether to convert this residual."""

    @abstractmethod
    def pack(self, value: Tensor) -> Sequence[Tensor]:
        """Return the tensors to store."""

    @abstractmethod
    def unpack(self, *parts: Tensor) -> Tensor:
        """Return the value from the stored tensors."""

    def rewrite(self, unit: Unit) -> None:
        if unit.exchange is not None:
            unit.exchange(self.is_chosen, self.pack, self.unpack)
            return
        traced, mesh = unit.program.traced, unit.program.mesh
        for value, readers in residuals(traced).items():
            if view_base(value) is None and self.is_chosen(value):
                with traced.graph.inserting_before(value.next):
                    parts = call_inline(traced, self.pack, [value], mesh, info(value))
                restore(traced, self.unpack, value, parts, readers, mesh)


@dataclass(frozen=True)
class ViewsAgain(ProgramPass):
    """Let the backward take views of saved values itself, so that no value is stored twice."""

    name: ClassVar[str] = "views again"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls()] if any(isinstance(each, StoredResiduals) for each in settings.requested) else []

    def run(self, traced: Traced, mesh: Mesh) -> None:
        insert_recompute(traced, {value for value in residuals(traced) if view_base(value) is not None})


def restore(
    traced: Traced,
    unpack: Callable[..., Tensor],
    value: fx.Node,
    parts: Sequence[fx.Node],
    readers: Sequence[fx.Node],
    mesh: Mesh,
) -> None:
    """Let ops read a value that is unpacked before the first of them."""
    with traced.graph.inserting_before(readers[0]):
        known = info(value)._replace(backward=True, recomputed=True)
        (restored,) = call_inline(traced, lambda *stored: [unpack(*stored)], parts, mesh, known)
    for reader in readers:
        reader.replace_input_with(value, restored)


def call_inline(
    traced: Traced, f: Callable[..., Sequence[Tensor]], operands: Sequence[fx.Node], mesh: Mesh, like: NodeInfo
) -> list[fx.Node]:
    """Insert the ops of a function on values of a graph. They are ops of the same direction and line as `like`."""
    with bind(mesh.shape, None):
        avals, types = [info(each).aval for each in operands], [info(each).typed for each in operands]
        body = trace(f, avals, types=types, on_node=Typing(mesh.shape))
    values = dict(zip(body.inputs, operands, strict=True))
    for node in body.nodes:
        made = info(node)._replace(source=like.source, forward_node=like.forward_node)
        made = made._replace(backward=like.backward, recomputed=like.recomputed)
        values[node] = traced.add_copy(node, values.__getitem__, made)
    return [values[output] for output in body.outputs]
