"""Value with an attached spec."""

from __future__ import annotations

import torch

from .spec import P


class Annotated:
    """Value with its spec. It is a leaf of a pytree until `split` separates the two."""

    __slots__ = ("spec", "value")

    def __init__(self, value: torch.Tensor, spec: P) -> None:
        self.value, self.spec = value, spec

    def __repr__(self) -> str:
        return f"Annotated(shape={tuple(getattr(self.value, 'shape', ()))}, {self.spec!r})"
