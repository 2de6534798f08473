"""The most bytes of tensors alive at once in a step, as torch's own allocator tells of them.

The same number as `torch.cuda.max_memory_allocated` gives on a GPU: kernels' workspaces count, Python's objects, code
and the heap's gaps do not. The CPU's allocator tells the profiler of every block, and of the release only of those
that it gave since the profile began: so the model is made inside of it.

A block that another thread gives back, as gloo's do with what they have sent, is not reported. It is gone at the latest
when another block lies where it was.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

__all__ = ["most_alive", "peak_of_tensors"]

_MARK = "the steps that count"


def peak_of_tensors(begin: Callable[[], Callable[[], object]], steps: int = 2) -> int:
    """Bytes above what is alive before.

    Args:
        begin: makes all that a step needs, and takes the first steps; returns what takes one more.
        steps: how many count.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = begin()
        with torch.profiler.record_function(_MARK):
            for _ in range(steps):
                step()
    return most_alive(*_blocks(profile))


def most_alive(blocks: Iterable[tuple[float, int, int]], begin: float, end: float) -> int:
    """The most bytes alive at once from a time on until another.

    Args:
        blocks: when each was given out or back, its address, and its bytes, negative when given back.
        begin: the first time.
        end: the last time.
    """
    alive: dict[int, int] = {}
    starts: list[int] = []
    total = most = 0
    for when, address, size in sorted(blocks, key=lambda block: block[0]):
        if when > begin:
            most = max(most, total)
        if when > end:
            break
        first, last = bisect_left(starts, address), bisect_left(starts, address + max(size, 1))
        if first and starts[first - 1] + alive[starts[first - 1]] > address:
            first -= 1
        total -= sum(alive.pop(start) for start in starts[first:last])
        starts[first:last] = [address] if size > 0 else []
        if size > 0:
            alive[address] = size
            total += size
    return max(most, total)


def _blocks(profile: Any) -> tuple[list[tuple[float, int, int]], float, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    (mark,) = (event for event in events if event.get("name") == _MARK and event.get("cat") == "user_annotation")
    told = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    blocks = [(event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in told]
    return blocks, mark["ts"], mark["ts"] + mark["dur"]
