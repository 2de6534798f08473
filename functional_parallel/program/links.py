"""Cost of a message: latency + bytes × time per byte, the α-β model (Hockney, Parallel Computing 20, 1994)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Line"]


@dataclass(frozen=True)
class Line:
    """Seconds for n bytes: `alpha + beta * n`.

    >>> print(Line(5e-6, 1 / 50e9))
    5 µs + n / 50.0 GB/s
    >>> print(Line(20e-3, 1 / 2.5e6))
    20000 µs + n / 2.5 MB/s

    Attributes:
        alpha: seconds of an empty message.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes."""
        return self.alpha + self.beta * size

    def __str__(self) -> str:
        unit, name = (1e9, "GB/s") if self.beta * 1e8 <= 1 else (1e6, "MB/s")
        return f"{1e6 * self.alpha:.0f} µs + n / {1 / unit / self.beta:.1f} {name}"
