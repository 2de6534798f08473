"""What share of a peer's time, of the ideal's and of a peer's memory ours may take, and who takes more.

A row that misses its target is set beside a bound: what the same program takes without its communication (`quiet.py`),
and its bytes by the fastest way between ranks that was measured. Where both together lie above the target already, only
other kernels, other work for the same result, or communication that hides behind computing could meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import report

__all__ = ["HEAD", "TARGETS", "judged", "misses", "target"]

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
IDEAL = {  # of half a plain step on one rank, and so on; not at tiny, where half the batch takes more than half of it
    "DDP": 1.05,
    "ZeroRedundancyOptimizer": 1.05,
    "FSDP2, resharding": 1.12,
    "FSDP2, keeping": 1.12,
    "DTensor TP": 1.15,
    "DTensor SP": 1.15,
}
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


def judged(rows: Sequence[dict[str, Any]]) -> str:
    """Who meets which target: against the peer's time, against the ideal, and of memory."""
    peers = [row for row in rows if row["name"] in TARGETS]
    ideal = [row for row in peers if row["name"] in IDEAL and row["config"] != "tiny"]
    beyond = [f"{_named(row)} {row['ideal_ratio']:.2f}" for row in ideal if row["ideal_ratio"] > IDEAL[row["name"]]]
    measured = [row for row in peers if "tensor_ratio" in row]
    larger = [f"{_named(row)} {row['tensor_ratio']:.2f}" for row in measured if row["tensor_ratio"] > 1]
    sentences = [misses(rows)]
    if ideal:
        sentences.append(_sentence(ideal, "that have a target against the ideal meet it", beyond))
    if measured:
        sentences.append(_sentence(measured, "hold no more tensors than their peer's", larger))
    return "\n\n".join(sentences)


def _named(row: dict[str, Any]) -> str:
    return f"{row['name']} on {row['config']} with {row['ranks']} ranks:"


def _sentence(rows: Sequence[object], what: str, others: Sequence[str]) -> str:
    ending = f". The others: {'; '.join(others)}." if others else "."
    return f"{len(rows) - len(others)} of the {len(rows)} rows {what}{ending}"


def misses(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the rows that miss their target, or a sentence that says how many met it."""
    shares = [(row, share) for row in rows if (share := target(row["name"], row["config"])) is not None]
    missed = [_cells(row, share) for row, share in shares if row["ratio"] > share]
    count = len(shares)
    if not shares:
        return "No row has a target."
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
