"""A collective in flight: started when its operand is ready, waited for when its result is needed.

The algorithm is torch's, or a generator that sends, then yields the messages that it must wait for.

    def exchange(team, x, result):
        messages = team.messages()
        yield [messages.receive(result, 1), messages.send(x, 1)]

The code before the first `yield` runs when the collective starts, the rest when it is waited for. An algorithm of one
round therefore runs during the computation, and no algorithm needs a thread. All ranks run one program: they start
and wait for the same collectives in the same order. A waiting rank therefore always waits for a collective in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ...errors import CallMismatchError
from .waits import CURRENT, NamedWait

Result = TypeVar("Result")


class Waitable(Protocol):
    """A message in flight, such as torch's handle of an asynchronous operation."""

    def wait(self) -> bool | None: ...


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


class PendingCollective:
    """A started collective. `start` returns torch's handle, or None if no data must be sent.

    `finish` computes the result after all bytes have arrived. Until then its closure keeps the buffers alive.
    """

    __slots__ = ("_began", "_finish", "_on", "_work")

    def __init__(self, start: Callable[[], Waitable | None], finish: Callable[[], Any], wait: NamedWait) -> None:
        self._finish, self._on = finish, wait
        self._began = time.monotonic()
        self._work = self._noted(start)

    def wait(self) -> Any:
        """Wait and return the result: a contiguous tensor, or several tensors."""
        if self._work is not None:
            self._noted(self._work.wait)
        result = self._finish()
        return result.contiguous() if isinstance(result, Tensor) else result

    def tensor(self) -> Tensor:
        """Wait and return the result of a collective without a layout."""
        result: Tensor = self.wait()
        return result

    def _noted(self, act: Callable[[], Result]) -> Result:
        before, CURRENT.on = CURRENT.on, self._on
        CURRENT.waits += 1
        try:
            return act()
        except CallMismatchError as error:
            raise CallMismatchError(f"{self._on.where}: {error}" if self._on.where else str(error)) from error
        except (RuntimeError, ValueError) as error:
            raise self._on.failure(time.monotonic() - self._began, error) from error
        finally:
            CURRENT.on = before
