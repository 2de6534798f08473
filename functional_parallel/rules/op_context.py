"""Context of one op in a partition: the data that its sharding rule may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from ..collectives import DimSplit, axis_index, psum
from ..ir import Aval, where
from .axis_layout import PARTIAL, Owned, Shard, shard_shape
from .convert import convert
from .decide import OperandInfo, OpSharding, SplitFactor
from .duplicates import mask_duplicates, unique_mask


@dataclass
class OpContext:
    node: fx.Node
    axis: str
    parts: DimSplit
    operands: list[OperandInfo]
    results: list[Aval | None]
    emit: Callable[..., Any]
    decision: OpSharding = field(default_factory=lambda: OpSharding((), ()))
    owner: Owned | None = None
    is_on_owner: bool = False  # after the op has run: whether only the owner has its results

    @property
    def where(self) -> str:
        return where(self.node)

    @property
    def choice(self) -> SplitFactor | None:
        return self.decision.choice

    def splits(self, factor: str) -> bool:
        return self.choice is not None and self.choice.factor == factor

    def result(self, index: int = 0) -> Aval:
        found = self.results[index]
        assert found is not None, f"{self.where}: result {index} is not a tensor"
        return found

    def local_result_shape(self, index: int = 0) -> list[int]:
        return list(shard_shape(self.result(index).shape, self.decision.results[index], self.parts))

    def run(self, *args: Argument, **kwargs: Argument) -> torch.Tensor:
        """Run the op itself on a rank's operands. It has one result; use `emit` for others."""
        result: torch.Tensor = self.emit(self.node.target, args, kwargs)
        return result

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of partial sums over the ranks. With an owner, the owner alone gets it, and the results."""
        if self.owner is None:
            return psum(x, self.axis)
        self.is_on_owner = True
        return convert(x, PARTIAL, self.owner, self.axis, self.parts)

    def once(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Replace the samples of the first operand's shard `x` that an earlier rank holds too by `fill`."""
        return mask_duplicates(x, self.decision.operands[0], self.axis, self.parts, fill)

    def own(self, extent: int, device: torch.device) -> torch.Tensor | bool:
        """Return a mask, along the sharded dim of the first operand, of the samples that no earlier rank holds."""
        # True means all samples.
        place = self.decision.operands[0]
        if self.parts.is_even or not isinstance(place, Shard):
            return True
        return unique_mask(extent, place, self.axis, self.parts, device)

    def held_positions(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = self.decision.operands[0]
        assert isinstance(place, Shard)
        extent = self.parts.local(self.operands[0].aval.shape[place.dim])
        held, inside = self.parts.held_position(index, axis_index(self.axis), extent, place.outer)
        held, own = held.clamp(0, extent - 1), self.own(extent, index.device)
        return held, inside if isinstance(own, bool) else inside & own[held]
