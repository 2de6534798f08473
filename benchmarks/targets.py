"""What share of a peer's time, of the ideal's and of a peer's memory ours may take, and who takes more.

A row that misses its target is set beside a bound: what the same program takes without its communication (`quiet.py`),
and its bytes by the fastest way between ranks that was measured. Where both together lie above the target already, only
other kernels, other work for the same result, or communication that hides behind computing could meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import report

__all__ = ["TARGETS", "judged", "misses", "target"]

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
BOUND = ("staged compute, ms", "transfer, ms", "both lie above the target")

Row = dict[str, Any]


def target(name: str, size: str) -> float | None:
    """The largest share of the peer's time; None without one."""
    if name not in TARGETS:
        return None
    return min(TARGETS[name], TINY.get(name, EACH_TINY)) if size == "tiny" else TARGETS[name]


def judged(rows: Sequence[Row]) -> str:
    """Who meets which target: against the peer's time, against the ideal, and of memory."""
    peers = [row for row in rows if row["name"] in TARGETS]
    ideal = [row for row in peers if row["name"] in IDEAL and row["config"] != "tiny"]
    measured = [row for row in peers if "tensor_ratio" in row]
    larger = [f"{_named(row)} {row['tensor_ratio']:.2f}" for row in measured if row["tensor_ratio"] > 1]
    sentences = [misses(rows)]
    if ideal:
        cases = [(row, IDEAL[row["name"]], row["ideal_ratio"]) for row in ideal]
        sentences.append(_late(cases, "ours ÷ ideal", " against the ideal"))
    if measured:
        ending = f". The others: {'; '.join(larger)}." if larger else "."
        held = len(measured) - len(larger)
        sentences.append(f"{held} of the {len(measured)} rows hold no more tensors than their peer's{ending}")
    return "\n\n".join(sentences)


def _named(row: Row) -> str:
    return f"{row['name']} on {row['config']} with {row['ranks']} ranks:"


def misses(rows: Sequence[Row]) -> str:
    """A table of the rows that miss their target of the peer's time, or a sentence that says how many met it."""
    shares = ((row, target(row["name"], row["config"])) for row in rows)
    cases = [(row, share, row["ratio"]) for row, share in shares if share is not None]
    return _late(cases, "ours ÷ peer") if cases else "No row has a target."


def _late(cases: Sequence[tuple[Row, float, float]], compared: str, of: str = "") -> str:
    """Rows, each with its target and with what it came to."""
    missed = [_cells(row, share, ratio) for row, share, ratio in cases if ratio > share]
    if not missed:
        return f"All {len(cases)} rows that have a target{of} meet it."
    head = ("peer", "size", "ranks", "target", compared, "target, ms", "ours, ms", *BOUND)
    met = f"{len(cases) - len(missed)} of the {len(cases)} rows that have a target{of} meet it"
    return f"{met}. The others:\n\n{report.table(head, missed)}"


def _cells(row: Row, share: float, ratio: float) -> tuple[object, ...]:
    allowed, held = share * row["ours_s"] / ratio, ("not measured",) * 3
    if "floor_s" in row:
        parts = [f"{1000 * seconds:.1f}" for seconds in (row["quiet_s"], row["floor_s"] - row["quiet_s"])]
        held = (*parts, "yes" if row["floor_s"] > allowed else "no")
    times = [f"{1000 * seconds:.1f}" for seconds in (allowed, row["ours_s"])]
    return (row["name"], row["config"], row["ranks"], f"{share:.2f}", f"{ratio:.2f}", *times, *held)
