"""What share of a peer's time ours may take at most, and what stands against it where it takes more.

A row that misses its target is set beside a bound: what the same program takes without its communication (`quiet.py`),
and its bytes by the fastest way between ranks that was measured. Where both together lie above the target already, only
other kernels, other work for the same result, or communication that hides behind computing could meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import report

__all__ = ["HEAD", "TARGETS", "misses", "target"]

TARGETS = {  # by peer; DeepSpeed and JAX have none
    "DDP": 0.97,
    "FSDP2, resharding": 0.85,
    "FSDP2, keeping": 0.85,
    "ZeroRedundancyOptimizer": 0.88,
    "DTensor TP": 0.60,
    "DTensor SP": 0.50,
    "GPipe": 0.88,
    "1F1B": 0.88,
    "interleaved 1F1B": 0.88,
    "ZBV": 0.88,
}
TINY = {"DTensor TP": 0.30}
EACH_TINY = 0.70
HEAD = (
    "peer",
    "size",
    "ranks",
    "target",
    "ours ÷ peer",
    "target, ms",
    "ours, ms",
    "staged compute, ms",
    "transfer, ms",
    "both lie above the target",
)


def target(name: str, size: str) -> float | None:
    """The largest share of the peer's time; None without one."""
    if name not in TARGETS:
        return None
    return min(TARGETS[name], TINY.get(name, EACH_TINY)) if size == "tiny" else TARGETS[name]


def misses(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the rows that miss their target, or a sentence that says how many met it."""
    judged = [(row, target(row["name"], row["config"])) for row in rows]
    missed = [_cells(row, share) for row, share in judged if share is not None and row["ratio"] > share]
    count = sum(share is not None for _, share in judged)
    if not missed:
        return f"All {count} rows that have a target meet it."
    return f"{count - len(missed)} of the {count} rows that have a target meet it. The others:\n\n" + report.table(
        HEAD, missed
    )


def _cells(row: dict[str, Any], share: float) -> tuple[object, ...]:
    allowed, held = share * row["peer_s"], ("not measured",) * 3
    if "floor_s" in row:
        parts = [f"{1000 * seconds:.1f}" for seconds in (row["quiet_s"], row["floor_s"] - row["quiet_s"])]
        held = (*parts, "yes" if row["floor_s"] > allowed else "no")
    times = [f"{1000 * seconds:.1f}" for seconds in (allowed, row["ours_s"])]
    return (row["name"], row["config"], row["ranks"], f"{share:.2f}", f"{row['ratio']:.2f}", *times, *held)
