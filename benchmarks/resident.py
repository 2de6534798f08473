"""Resident memory of this process, and its peak since it was last asked to forget it (Linux)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["peak", "reset_peak", "resident"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes now."""
    return _bytes("VmRSS")


def peak() -> int:
    """The most bytes since the process began, or since `reset_peak`."""
    return _bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak be what is resident now."""
    _CLEAR.write_text("5")


def _bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
