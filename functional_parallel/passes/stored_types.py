"""Read a stored parameter directly where it is cast to a wider dtype and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info
from .base import Phase, ProgramPass

__all__ = ["WidenedAndNarrowed"]

aten = torch.ops.aten


@dataclass(frozen=True)
class WidenedAndNarrowed(ProgramPass):
    """Replace the cast of a stored parameter to float32 and back by the parameter."""

    name: ClassVar[str] = "stored types"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for cast in list(traced.nodes):
            source = _widened(cast)
            if source is not None:
                cast.replace_all_uses_with(source)
                traced.outputs = [source if output is cast else output for output in traced.outputs]
                traced.graph.erase_node(cast)


def _widened(cast: fx.Node) -> fx.Node | None:
    """Return the value that is cast to a wider dtype and back by this node; None for any other node."""
    if cast.target is not aten._to_copy.default or cast.args[0].target is not aten._to_copy.default:
        return None
    source, wide = cast.args[0].args[0], info(cast.args[0]).aval
    before, after = info(source).aval.dtype, info(cast).aval.dtype
    return source if before == after and before.itemsize < wide.dtype.itemsize and _is_plain(cast) else None


def _is_plain(cast: fx.Node) -> bool:
    return set(cast.kwargs) == {"dtype"} and set(cast.args[0].kwargs) == {"dtype"}
