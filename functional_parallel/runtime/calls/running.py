"""A collective algorithm under way: a generator that sends, then yields what it has to wait for before it goes on.

    def exchange(team, x, result):
        messages = team.messages()
        yield [messages.receive(result, 1), messages.send(x, 1)]

What comes before the first `yield` is done when the collective starts, the rest when it is waited for. So an algorithm
of one round travels while the program computes, and no algorithm needs a thread. All ranks run one program: they start
and wait for the same collectives in the same order, hence a rank that waits always waits for one that is on its way.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

__all__ = ["CollectiveSteps", "RunningCollective", "Waitable"]


class Waitable(Protocol):
    """A message under way, such as torch's handle of an asynchronous operation."""

    def wait(self) -> Any: ...


CollectiveSteps = Generator[Sequence[Waitable], None, None]


class RunningCollective:
    """Runs the steps of one collective on this rank, the first of them at once."""

    __slots__ = ("_awaited", "_steps")

    def __init__(self, steps: CollectiveSteps) -> None:
        self._steps: CollectiveSteps | None = steps
        self._awaited: Sequence[Waitable] = ()
        self._go_on()

    def wait(self) -> None:
        """Go through all steps; a second call does nothing."""
        while self._steps is not None:
            self.step()

    def step(self) -> None:
        """Wait for what is under way, and go on to the next thing to wait for."""
        for message in self._awaited:
            message.wait()
        self._go_on()

    def _go_on(self) -> None:
        assert self._steps is not None
        try:
            self._awaited = next(self._steps)
        except StopIteration:
            self._steps, self._awaited = None, ()
