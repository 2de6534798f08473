"""A collective under way: started as soon as its operand is there, waited for when its result is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .algorithms.doing import OutOfStepError

__all__ = ["CollectiveError", "Pending"]


class CollectiveError(RuntimeError):
    """A collective that failed or timed out, with who was doing what."""


class Pending:
    """What starting a collective returns.

    Args:
        start: starts it, and returns torch's handle of it, or None when nothing needs to travel.
        finish: makes the result, a tensor or several, once all bytes are there; until then what it refers to is kept.
        describe: who does what, and the sentence for a failure after so many seconds.

    Attributes:
        where: the line of user code that it came from, where one is known.
    """

    __slots__ = ("_began", "_describe", "_finish", "_work", "where")

    def __init__(self, start: Callable[[], Any], finish: Callable[[], Any], describe: Callable[[float], str]) -> None:
        self._finish, self._describe = finish, describe
        self._began = time.monotonic()
        self.where = ""
        try:
            self._work = start()
        except OutOfStepError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._failure(error) from error

    def wait(self) -> Any:
        """The result: a tensor, contiguous, or several."""
        try:
            if self._work is not None:
                self._work.wait()
        except OutOfStepError as error:
            raise OutOfStepError(f"{self.where}: {error}" if self.where else str(error)) from None
        except (RuntimeError, ValueError) as error:
            raise self._failure(error) from error
        result = self._finish()
        return result.contiguous() if isinstance(result, Tensor) else result

    def _failure(self, error: Exception) -> CollectiveError:
        where = f"{self.where}: " if self.where else ""
        return CollectiveError(f"{where}{self._describe(time.monotonic() - self._began)} torch says: {error}")
