"""The state of a training run: what a step takes and returns, and may use up."""

from __future__ import annotations

from typing import Any

__all__ = ["DonatedStateError", "TrainState"]


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
