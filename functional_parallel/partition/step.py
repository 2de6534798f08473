"""One op on its way through a partition: what a rule may ask about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..collectives.parts import Parts
from ..tracing import Aval, source_of
from .decide import Choice, Decision, Operand
from .duplicates import once, own
from .placement import Place, Shard, local_shape

__all__ = ["Step"]


@dataclass
class Step:
    """An op with its operands' places, and, once decided, the places of its results."""

    node: fx.Node
    axis: str
    parts: Parts
    operands: list[Operand]
    results: list[Aval]
    emit: Callable[..., Any]
    decision: Decision = field(default_factory=lambda: Decision((), ()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.parts.ranks

    @property
    def where(self) -> str:
        """The op and its source line, for messages."""
        return f"{self.node.target} at {source_of(self.node) or 'an unknown line'}"

    @property
    def choice(self) -> Choice | None:
        return self.decision.choice

    def splits(self, factor: str) -> bool:
        """Whether the op is sharded on that factor of its rule."""
        return self.choice is not None and self.choice.factor == factor

    def result_place(self, index: int = 0) -> Place:
        return self.decision.results[index]

    def local_result_shape(self, index: int = 0) -> list[int]:
        """The shape that a rank holds of a result."""
        return list(local_shape(self.results[index].shape, self.result_place(index), self.parts))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The op itself, on a rank's operands."""
        return self.emit(self.node.target, args, kwargs)

    def once(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """The first operand's part, with `fill` for samples that another rank holds too."""
        return once(x, self.decision.operands[0], self.axis, self.parts, fill)

    def own(self, extent: int, device: Any) -> torch.Tensor | bool:
        """Along the dim in which the first operand is sharded: which samples no other rank before this one holds."""
        place = self.decision.operands[0]
        if self.parts.is_even or not isinstance(place, Shard):
            return True
        return own(extent, place, self.axis, self.parts, device)

    def part(self, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """A rank's slice of a small whole tensor along an unsplit dim."""
        length = self.parts.local(tensor.shape[dim])
        positions = self.parts.start(index) * (length // self.parts.rows) + torch.arange(length, device=tensor.device)
        return tensor.index_select(dim, positions)


def shard_of(place: Place) -> Shard | None:
    return place if isinstance(place, Shard) else None
