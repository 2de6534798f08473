"""Keep residuals in another memory than the device's between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from sharding_specs import Mesh

from ..ir import Aval, info
from ..ops import TO_MEMORY, device_of_memory
from ..quantities import readable_bytes
from .stored_residuals import StoredResiduals, counted, made_of_batch, size_of


@dataclass(frozen=True)
class MovedResiduals(StoredResiduals):
    """Move activations to another memory when they are computed, and back before the backward reads them."""

    memory: str
    at_least: int  # bytes of the values to move
    fraction: float = 1.0  # share of their bytes
    name: ClassVar[str] = "moved residuals"

    def chosen(self, values: Sequence[fx.Node], mesh: Mesh) -> Sequence[fx.Node]:
        """Return the first values, up to the share: they wait longest for the backward."""
        activations = made_of_batch(values[0].graph) if values else set()
        large = [value for value in values if value in activations and info(value).nbytes >= self.at_least]
        left, found = self.fraction * size_of(large), list[fx.Node]()
        for value in sorted(large):
            if info(value).nbytes <= left:
                left -= info(value).nbytes
                found.append(value)
        return found

    def note(self, stored: Sequence[fx.Node]) -> str:
        if not stored:
            return f"{self}: there is no saved activation of {readable_bytes(self.at_least)} or more to move"
        return f"{self}: {counted(stored)} moved"

    def pack(self, value: Tensor) -> Sequence[Tensor]:
        return [move(value, self.memory, value.device)]

    def unpack(self, parts: Sequence[Tensor], like: Aval) -> Tensor:
        return move(parts[0], "device", like.device)

    def __str__(self) -> str:
        return f"offload(activations={self.memory!r})"


def move(x: Tensor, memory: str, device: torch.device) -> Tensor:
    """Move a value of a program for a device. A pass runs when all derivatives are in the program."""
    return TO_MEMORY(x, memory, device=device_of_memory(memory, device))
