"""The state of a training run: what a step takes and returns, and may use up."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DonatedStateError", "TrainState", "own", "storages"]


class DonatedStateError(RuntimeError):
    """A state that was given to a step, and whose memory now holds a later one."""


class TrainState:
    """Parameters and optimizer state as the runtime holds them, sharded."""

    __slots__ = ("_handles", "_step")

    def __init__(self, step: int, handles: tuple[Any, ...]) -> None:
        self._step = step
        self._handles: tuple[Any, ...] | None = handles

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._step

    @property
    def handles(self) -> tuple[Any, ...]:
        """What the runtime holds per leaf.

        Raises:
            DonatedStateError: when a step has used them up.
        """
        if self._handles is None:
            raise DonatedStateError(
                f"this state, of step {self.step}, was given to a step, which wrote the next state into its memory. "
                "Use the state that the step returned; to keep an old one, give the step train.copy(state), or build "
                "it by train_step(donate=False), at the price of a second copy of parameters and optimizer state"
            )
        return self._handles

    def give(self) -> tuple[Any, ...]:
        """The handles, for good."""
        handles = self.handles
        self._handles = None
        return handles

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}{', donated' if self._handles is None else ''})"


def storages(*values: Any) -> set[int]:
    """Where tensors, and handles of several, lie in memory; of other values nothing."""
    parts = (part for value in values for part in (value if isinstance(value, list) else [value]))
    return {part.untyped_storage().data_ptr() for part in parts if isinstance(part, torch.Tensor)}


def own(handle: Any, taken: set[int]) -> Any:
    """A handle in memory that nobody else has: copied where that is taken, and taken from now on.

    What a pipeline's ranks hold is never written into, and so stays as it is.
    """
    if isinstance(handle, list):
        return [own(part, taken) for part in handle]
    if not isinstance(handle, torch.Tensor):
        return handle
    if not handle.is_contiguous() or storages(handle) & taken:
        handle = handle.clone(memory_format=torch.contiguous_format)
    taken |= storages(handle)
    return handle
