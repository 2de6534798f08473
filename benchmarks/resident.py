"""Resident memory of this process, and its peak since it was last asked to forget it (Linux).

Without what it maps from files, which is the code of libraries: that belongs to all processes together. Run it with
`MALLOC_MMAP_THRESHOLD_` at a few pages, so that what is freed is given back, and the peak is of what lives at once.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["THRESHOLD", "peak", "reset_peak", "resident"]

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes now."""
    return _bytes("VmRSS") - _bytes("RssFile")


def peak() -> int:
    """The most bytes since the process began, or since `reset_peak`; files as they are mapped now."""
    return _bytes("VmHWM") - _bytes("RssFile")


def reset_peak() -> None:
    """Let the peak be what is resident now."""
    _CLEAR.write_text("5")


def _bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
