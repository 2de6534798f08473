"""Store values for the backward in another form: converted, split over ranks, or in another memory.

The forward converts a value just after it was computed, and the backward converts it back just before its first use.
Between them only the converted parts are alive.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from sharding_specs import Mesh

from ..checker import Typing
from ..collectives import bind
from ..ir import Aval, NodeInfo, Traced, first_operand, info, operands_of, reached, residuals
from ..program import memories_of, view_base
from ..quantities import readable_bytes
from ..tracing import trace
from .cheap import is_cheap
from .layer_index import made_of_parameters
from .program_pass import Phase, ProgramPass, Scope, Settings, Unit, Unpack
from .recompute import insert_recompute


class StoredResiduals(ProgramPass):
    """Store residuals in another form, given by two functions on tensors. They may call collectives.

    A stored value is restored as a contiguous tensor.
    """

    phase: ClassVar[Phase] = Phase.RESIDUALS
    scope: ClassVar[Scope] = Scope.PAIR

    @abstractmethod
    def chosen(self, values: Sequence[fx.Node], mesh: Mesh) -> Sequence[fx.Node]:
        """Return the residuals to convert, of all that a program saves, or a stage of a pipeline."""

    def check(self, settings: Settings) -> None:
        """Raise an error if the pass can do nothing on this mesh."""

    def note(self, stored: Sequence[fx.Node]) -> str | None:
        """Describe the change, for `explain`."""
        return None

    @abstractmethod
    def pack(self, value: Tensor) -> Sequence[Tensor]:
        """Return the tensors to store."""

    @abstractmethod
    def unpack(self, parts: Sequence[Tensor], like: Aval) -> Tensor:
        """Return the value from the stored tensors. `like` has its shape and dtype."""

    def taken(self, values: Sequence[fx.Node], mesh: Mesh) -> Sequence[fx.Node]:
        """Return the residuals to convert: of the residuals that a budget chose a way for, the ones of this pass."""
        return [value for value in self.chosen(values, mesh) if info(value).stored_by in (None, str(self))]

    def rewrite(self, unit: Unit) -> str | None:
        traced, mesh = unit.program.traced, unit.program.mesh
        is_decided = any(info(node).stored_by is not None for node in traced.graph.nodes)
        if unit.exchange is not None:
            stored = unit.exchange(self.taken, self.pack, self.unpack)
            return self.note(stored) if stored or not is_decided else None
        found = residuals(traced)
        stored = self.taken(on_device([value for value in found if not is_view(value)], traced), mesh)
        for value in stored:
            with traced.graph.inserting_before(next_op(value)):
                parts = call_inline(traced, self.pack, [value], mesh, info(value))
            restore(traced, self.unpack, value, parts, found[value], mesh)
        return self.note(stored) if stored or not is_decided else None


@dataclass(frozen=True)
class RecomputeFromStored(ProgramPass):
    """Let the backward take views of stored values, and results of cheap ops on stored values, itself."""

    stored: tuple[StoredResiduals, ...] = ()
    name: ClassVar[str] = "from stored values"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        stored = tuple(each for each in settings.requested if isinstance(each, StoredResiduals))
        return [cls(stored)] if stored else []

    def rewrite(self, unit: Unit) -> None:
        for each in self.stored:
            each.check(unit.settings)
        traced, mesh = unit.program.traced, unit.program.mesh
        saved = bases(residuals(traced))
        chosen = {value for each in self.stored for value in each.taken(on_device(saved, traced), mesh)}
        there, dropped = {*saved, *traced.inputs, *made_of_parameters(list(traced.nodes))}, set[fx.Node]()
        for value in residuals(traced):
            met = _to_bases([value])
            dropped.update(view for view in met if is_view(view) and not chosen.isdisjoint(met))
        for value in chosen:
            op = first_operand(value) if value.target is operator.getitem else value
            if info(value).stored_by is None and is_cheap(op) and there.issuperset(bases(operands_of(op))):
                dropped |= {op, value, *filter(is_view, _to_bases(operands_of(op)))}
        insert_recompute(traced, dropped)


def on_device(values: Sequence[fx.Node], traced: Traced) -> list[fx.Node]:
    """Return the values that no move has put into another memory."""
    memories = memories_of(traced)
    return [value for value in values if memories[value] == "device"]


def made_of_batch(graph: fx.Graph) -> set[fx.Node]:
    """Return the values that depend on an input which is neither a parameter nor state."""
    found = set[fx.Node]()
    for node in graph.nodes:
        known = info(node)
        is_input = node.op == "placeholder" and not (known.is_parameter or known.is_state)
        if is_input or (node.op == "call_function" and not found.isdisjoint(operands_of(node))):
            found.add(node)
    return found


def size_of(values: Sequence[fx.Node]) -> int:
    return sum(info(value).nbytes for value in values)


def counted(values: Sequence[fx.Node]) -> str:
    noun, verb = ("activation", "is") if len(values) == 1 else ("activations", "are")
    return f"{len(values)} saved {noun} of {readable_bytes(size_of(values))} {verb}"


def _to_bases(values: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return values, and if they are views, the views and the value that they are taken of."""
    return reached(values, lambda value: operands_of(value) if is_view(value) else ())


def bases(values: Iterable[fx.Node]) -> list[fx.Node]:
    return [value for value in _to_bases(values) if not is_view(value)]


def is_view(value: fx.Node) -> bool:
    is_op = value.op == "call_function" and value.target is not operator.getitem
    return is_op and view_base(value) is not None


def next_op(value: fx.Node) -> fx.Node:
    """Return the node before which ops on a value stand. The other results of its op are unpacked before them."""
    following = value.next
    while following.target is operator.getitem:
        following = following.next
    return following


def restore(
    traced: Traced,
    unpack: Unpack,
    value: fx.Node,
    parts: Sequence[fx.Node],
    readers: Sequence[fx.Node],
    mesh: Mesh,
) -> None:
    """Let ops read a value that is unpacked before the first of them."""
    with traced.graph.inserting_before(readers[0]):
        known = info(value)._replace(backward=True, recomputed=True)
        (restored,) = call_inline(traced, lambda *stored: [unpack(stored, known.aval)], parts, mesh, known)
    for reader in readers:
        reader.replace_input_with(value, restored)


def there_and_back(form: StoredResiduals, like: NodeInfo, mesh: Mesh) -> tuple[Traced, int]:
    """Return a program that stores and restores a value, and the bytes of the stored tensors on the device."""

    def stored(value: Tensor) -> list[Tensor]:
        parts = form.pack(value)
        return [*parts, form.unpack(parts, like.aval)]

    with bind(mesh.shape, None):
        body = trace(stored, [like.aval], types=[like.typed], on_node=Typing(mesh.shape))
    memories = memories_of(body)
    parts = [part for part in body.outputs[:-1] if isinstance(part, fx.Node) and memories[part] == "device"]
    return body, size_of(parts)


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
        made = made._replace(backward=like.backward, recomputed=like.recomputed, stored_by=like.stored_by)
        values[node] = traced.add_copy(node, values.__getitem__, made)
    return [values[output] for output in body.outputs]
