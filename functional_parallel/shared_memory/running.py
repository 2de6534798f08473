"""Steps of a collective: a generator that runs to its first `yield` at the start, and to its end at the wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ..runtime import Waitable

CollectiveSteps = Generator[Sequence[Waitable], None, None]


class RunningCollective:
    __slots__ = ("_awaited", "_steps")

    def __init__(self, steps: CollectiveSteps) -> None:
        self._steps: CollectiveSteps | None = steps
        self._awaited: Sequence[Waitable] = ()
        self.step()

    def wait(self) -> None:
        while self._steps is not None:
            self.step()

    def step(self) -> None:
        assert self._steps is not None
        for message in self._awaited:
            message.wait()
        try:
            self._awaited = next(self._steps)
        except StopIteration:
            self._steps, self._awaited = None, ()
