"""The seeded clock of a simulated run: how long each step of each rank takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..quantities import is_non_negative, is_number, is_positive


@dataclass(frozen=True)
class Clock:
    """Durations of the steps of simulated ranks. They depend on seed, rank and step alone, so a run replays exactly.

    >>> import functional_parallel as fp
    >>> clock = fp.asynchronous.Clock(seconds=(1.0, 5.0), jitter=0.1)
    >>> [round(clock.duration(rank, 0), 2) for rank in (0, 1)]
    [1.0, 4.79]

    Args:
        seconds: seconds of a step, one number for all ranks or one for each.
        jitter: largest relative deviation of a step, drawn uniformly.
        seed: the seed.

    Raises:
        ValueError: for seconds that are not positive, or a jitter that is not in [0, 1).
    """

    seconds: float | Sequence[float] = 1.0
    jitter: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        each = (self.seconds,) if is_number(self.seconds) else tuple(self.seconds)  # type: ignore[arg-type]
        if not each or not all(is_positive(one) for one in each):
            raise ValueError(f"{self!r}: seconds are positive, one number or one for each rank")
        if not is_non_negative(self.jitter) or self.jitter >= 1:
            raise ValueError(f"{self!r}: jitter is a number of at least 0 and below 1")

    def require(self, ranks: int) -> None:
        if isinstance(self.seconds, Sequence) and len(self.seconds) != ranks:
            raise ValueError(f"{self!r}: {len(self.seconds)} numbers of seconds for {ranks} ranks; give one for each")

    def duration(self, rank: int, step: int) -> float:
        seconds = self.seconds[rank] if isinstance(self.seconds, Sequence) else self.seconds
        drawn = random.Random(f"{self.seed}/{rank}/{step}").uniform(-1, 1)
        return float(seconds * (1 + self.jitter * drawn))
