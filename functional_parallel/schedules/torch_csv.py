"""CSV format of schedules that PyTorch's pipelining writes and reads.

Two actions that overlap share a cell: "(0F3;3B1)OVERLAP_F_B". Cells of communication, such as "0SEND_F1", are ignored.
The format has no weight versions. Here "0B5@3>6" reads version 3 and creates version 6; PyTorch ignores the suffix.
"""

from __future__ import annotations

import csv
import io
import re

from .actions import Action, Schedule, Versions, rows

_COMMUNICATION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)(?:@(?=[\d>])(\d*)(?:>(\d+))?)?(?![@>\w])")


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as the CSV that PyTorch's pipelining reads (format `compute_only`).

    >>> from functional_parallel import schedules
    >>> print(schedules.to_csv(schedules.gpipe(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    >>> print(schedules.to_csv(schedules.pipedream(2, 2)), end="")  # with the versions of its weights
    0F0@0,0F1@0,0B0@0>1,0B1@0>2
    1F0@0,1B0@0>1,1F1@1,1B1@1>2

    Args:
        schedule: any schedule. PyTorch reads the actions of an asynchronous schedule without their versions.

    Returns:
        The content of the file, with one row per rank.
    """

    def versioned(found: re.Match[str]) -> str:
        action, versions = Action(found[2], int(found[1]), int(found[3])), schedule.versions or Versions({}, {})
        read, made = versions.reads.get(action, ""), versions.writes.get(action)
        if made is not None:
            return f"{action}@{read}>{made}"
        return f"{action}@{read}" if action in versions.reads else str(action)

    file = io.StringIO()
    overlap = [[cell + "OVERLAP_F_B" if cell.startswith("(") else cell for cell in row] for row in rows(schedule)]
    csv.writer(file, lineterminator="\n").writerows([_ACTION.sub(versioned, cell) for cell in row] for row in overlap)
    return file.getvalue()


def from_csv(text: str, *, chains: int = 1, name: str = "csv") -> Schedule:
    """Read a schedule from a CSV in the format of PyTorch's pipelining or `to_csv`.

    >>> from functional_parallel import schedules
    >>> print(schedules.from_csv("0F0,,,0B0\\n,1F0,1B0,\\n"))
    csv: 2 stages on 2 ranks, 1 microbatch
    rank 0  0F0  0B0
    rank 1  1F0  1B0

    Args:
        text: content of the file, with one row per rank. Empty cells and communication are ignored.
        chains: number of copies of the model that run at the same time. The format does not contain it.
        name: name of the schedule.

    Returns:
        The schedule. The number of microbatches follows from the largest number in the file. The schedule has weight
        versions if the cells have them.

    Raises:
        ScheduleError: if a cell is not an action, two ranks run the same stage, or a stage has no actions.
    """
    lines = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    reads: dict[Action, int] = {}
    writes: dict[Action, int] = {}

    def plain(found: re.Match[str]) -> str:
        action = Action(found[2], int(found[1]), int(found[3]))
        if found[4]:
            reads[action] = int(found[4])
        if found[5]:
            writes[action] = int(found[5])
        return str(action)

    kept = [
        " ".join(_ACTION.sub(plain, cell) for cell in row if cell and not _COMMUNICATION.fullmatch(cell))
        for row in lines
    ]
    found = Schedule.of(kept, 0, chains=chains, name=name)
    microbatches = chains * (1 + max((action.microbatch for action in found), default=-1))
    versions = Versions(reads, writes) if reads or writes else None
    return Schedule(found.actions, found.rank_of_stage, microbatches, chains, found.pairs, versions, name=name)
