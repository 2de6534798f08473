"""The CSV of schedules that PyTorch's pipelining writes and reads.

Each row is a rank and each cell an action or, for a step in which the rank waits, nothing. Two actions that overlap
share a cell: "(0F3;3B1)OVERLAP_F_B". Files that it has lowered to communication (format `compute_comms`) hold
cells such as "0SEND_F1" too; what is sent follows from the actions, so those are passed over.
"""

from __future__ import annotations

import csv
import io
import re

from .actions import Schedule, rows

__all__ = ["from_csv", "to_csv"]

_COMMUNICATION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """The schedule in the CSV that PyTorch's pipelining reads (format `compute_only`).

    >>> from functional_parallel import schedules
    >>> print(schedules.to_csv(schedules.gpipe(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1

    Args:
        schedule: any schedule.

    Returns:
        The text of the file: a row per rank.
    """
    file = io.StringIO()
    overlap = [[cell + "OVERLAP_F_B" if cell.startswith("(") else cell for cell in row] for row in rows(schedule)]
    csv.writer(file, lineterminator="\n").writerows(overlap)
    return file.getvalue()


def from_csv(text: str, *, chains: int = 1, name: str = "csv") -> Schedule:
    """The schedule of a CSV such as PyTorch's pipelining writes.

    >>> from functional_parallel import schedules
    >>> print(schedules.from_csv("0F0,,,0B0\\n,1F0,1B0,\\n"))
    csv: 2 stages on 2 ranks, 1 microbatch
    rank 0  0F0  0B0
    rank 1  1F0  1B0

    Args:
        text: the file: a row per rank; empty cells and communication are passed over.
        chains: how many copies of the model run at once; the format does not say.
        name: what to call it.

    Returns:
        The schedule, with as many microbatches as are named.

    Raises:
        ScheduleError: where a cell is no action, or a stage's actions lie on two ranks.
    """
    lines = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    kept = [" ".join(cell for cell in row if cell and not _COMMUNICATION.fullmatch(cell)) for row in lines]
    found = Schedule.of(kept, 0, chains=chains, name=name)
    microbatches = chains * (1 + max((action.microbatch for action in found), default=-1))
    return Schedule(found.actions, found.rank_of_stage, microbatches, chains, found.pairs, name=name)
