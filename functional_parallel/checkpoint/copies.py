"""Copies of a state in main memory. A thread writes them while steps change the state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .files import Tensors
from .plan import WriteItem


class Copies:
    """Main memory for copies of the boxes that this process writes. The next save reuses it: new memory is slower."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str, str, int], list[torch.Tensor]] = {}

    def of(self, rank: int, items: Sequence[WriteItem], tensors: Tensors) -> Tensors:
        """Copy the boxes of a rank, and return the function that returns the copies."""
        old, found = self._held, {}
        for item in items:
            name = (rank, item.leaf.kind, item.leaf.key, item.number)
            parts = [part.detach() for part in tensors(item)]
            memory = old.pop(name, [])
            if [(x.shape, x.dtype) for x in memory] != [(x.shape, x.dtype) for x in parts]:
                memory = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in parts]
            for into, part in zip(memory, parts, strict=True):
                into.copy_(part)
            found[name] = memory
        self._held = {name: memory for name, memory in old.items() if name[0] != rank} | found
        return lambda item: found[rank, item.leaf.kind, item.leaf.key, item.number]
