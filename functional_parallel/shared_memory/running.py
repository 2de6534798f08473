"""Steps of a collective: a generator that sends, then yields the signals that it must wait for.

The code before the first `yield` runs when the collective starts, the rest when it is waited for. A collective of one
round therefore runs during the computation, and none needs a thread. All ranks run one program: they start and wait for
the same collectives in the same order. A waiting rank therefore always waits for a collective in flight.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ..runtime import Waitable

CollectiveSteps = Generator[Sequence[Waitable], None, None]


class RunningCollective:
    """Run the steps of one collective on this rank. The first step runs immediately."""

    __slots__ = ("_awaited", "_steps")

    def __init__(self, steps: CollectiveSteps) -> None:
        self._steps: CollectiveSteps | None = steps
        self._awaited: Sequence[Waitable] = ()
        self.step()

    def wait(self) -> None:
        """Run all steps. A second call has no effect."""
        while self._steps is not None:
            self.step()

    def step(self) -> None:
        """Wait for the messages in flight and run to the next wait."""
        assert self._steps is not None
        for message in self._awaited:
            message.wait()
        try:
            self._awaited = next(self._steps)
        except StopIteration:
            self._steps, self._awaited = None, ()
