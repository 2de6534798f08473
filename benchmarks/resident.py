"""Resident memory of this process, and its peak since it was last asked to forget it (Linux).

Without what it maps from files, which is the code of libraries, and of memory that processes share its share (as in a
proportional set size), so that the sum over ranks is what they hold. Run it with `MALLOC_MMAP_THRESHOLD_` at a few
pages: then what is freed is given back, and the peak is of what lives at once.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["THRESHOLD", "peak", "reset_peak", "resident", "shared"]

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
_STATUS, _SHARES, _CLEAR = (Path("/proc/self") / name for name in ("status", "smaps_rollup", "clear_refs"))


def resident() -> int:
    """Bytes now."""
    return _bytes(_STATUS, "VmRSS") - _of_others()


def peak() -> int:
    """The most bytes since the process began, or since `reset_peak`; files and shared memory as they are now."""
    return _bytes(_STATUS, "VmHWM") - _of_others()


def reset_peak() -> None:
    """Let the peak be what is resident now."""
    _CLEAR.write_text("5")


def shared() -> int:
    """This process's share of the memory that processes share."""
    return _bytes(_SHARES, "Pss_Shmem") if _bytes(_STATUS, "RssShmem") else 0


def _of_others() -> int:
    return _bytes(_STATUS, "RssFile") + _bytes(_STATUS, "RssShmem") - shared()


def _bytes(file: Path, field: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
