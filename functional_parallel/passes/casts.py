"""Casts of parameters: gather in the dtype of their use, and skip a wider dtype that nothing needs.

The values do not change, because a narrowing cast acts on each element separately. Half the bytes are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, change_call, first_operand, info, primitive_name, reached, update_info
from .program_pass import Phase, ProgramPass
from .swap import is_cast, is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class CastBeforeGather(ProgramPass):
    """Replace cast(all_gather(x)) by all_gather(cast(x)) if nothing else uses the gathered value."""

    dtype: torch.dtype  # to gather in
    name: ClassVar[str] = "casts"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in reversed(list(traced.nodes)):  # of two gathers in a row the later one first
            if primitive_name(node) != "all_gather" or info(node).aval.dtype.itemsize <= self.dtype.itemsize:
                continue
            views = _views(node)
            uses = [user for each in views for user in each.users if not is_view(user)]
            narrowing = [use for use in uses if is_cast(use) and info(use).aval.dtype == self.dtype]
            if uses and len(narrowing) == len(uses):  # a result is used by the output
                self._swap(traced, node, narrowing)

    def _swap(self, traced: Traced, gather: fx.Node, casts: list[fx.Node]) -> None:
        operand = first_operand(gather)
        with traced.graph.inserting_before(gather):
            aval = replace(info(operand).aval, dtype=self.dtype)
            known = info(casts[0])._replace(type=info(operand).type, val=aval)
            moved = traced.call(aten._to_copy.default, (operand,), known, {"dtype": self.dtype})
        for node in _views(gather):
            update_info(node, val=replace(info(node).aval, dtype=self.dtype))
        change_call(gather, operand=moved)
        for cast in casts:
            traced.redirect(cast, cast.args[0])
            traced.graph.erase_node(cast)


def _views(node: fx.Node) -> dict[fx.Node, None]:
    return reached([node], lambda each: filter(is_view, each.users))


@dataclass(frozen=True)
class WidenedAndNarrowed(ProgramPass):
    """Replace the cast of a stored parameter to float32 and back by the parameter."""

    name: ClassVar[str] = "stored types"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for cast in list(traced.nodes):
            source = _widened(cast)
            if source is not None:
                traced.redirect(cast, source)
                traced.graph.erase_node(cast)


def _widened(cast: fx.Node) -> fx.Node | None:
    if not is_cast(cast) or not is_cast(cast.args[0]):
        return None
    widening = cast.args[0]
    source, wide = widening.args[0], info(widening).aval
    before, after = info(source).aval.dtype, info(cast).aval.dtype
    is_plain = set(cast.kwargs) == set(widening.kwargs) == {"dtype"}
    return source if before == after and before.itemsize < wide.dtype.itemsize and is_plain else None
