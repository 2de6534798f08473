"""A collective in flight: started when its operand is ready, waited for when its result is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ...errors import CallMismatchError
from .waits import CURRENT, NamedWait

Result = TypeVar("Result")


class Waitable(Protocol):
    def wait(self) -> bool | None: ...


class PendingCollective:
    """A started collective. `start` returns torch's handle, or None if no data must be sent."""

    __slots__ = ("_began", "_finish", "_on", "_work")

    def __init__(self, start: Callable[[], Waitable | None], finish: Callable[[], Any], wait: NamedWait) -> None:
        self._finish, self._on = finish, wait
        self._began = time.monotonic()
        self._work = self._noted(start)

    def wait(self) -> Any:
        if self._work is not None:
            self._noted(self._work.wait)
        result = self._finish()
        return result.contiguous() if isinstance(result, Tensor) else result

    def tensor(self) -> Tensor:
        result: Tensor = self.wait()
        return result

    def then(self, convert: Callable[[Any], Any]) -> PendingCollective:
        finish = self._finish
        self._finish = lambda: convert(finish())
        return self

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
