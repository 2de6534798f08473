"""Interface of an executor of one rank of a pipeline."""

from __future__ import annotations

from typing import Any, Protocol

from ...schedules import Action

__all__ = ["Executor"]


class Executor(Protocol):
    """Executor of the actions of one rank of a pipeline."""

    rank: int

    def begin(self) -> None:
        """Prepare the first action."""

    def act(self, action: Action) -> list[Any]:
        """Run an action and return the values to send."""
        ...

    def receive(self, action: Action, stage: int, values: list[Any]) -> None:
        """Store values that another stage sent."""
