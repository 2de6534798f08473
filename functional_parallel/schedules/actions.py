"""A pipeline schedule as data: messages follow from the order (`messages`), and times from costs (`simulate`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ScheduleError

ACTION_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)(?:OVERLAP_F_B)?")


class Action(NamedTuple):
    """One unit of work. `Action("F", 2, 0)` is the forward of stage 2 on microbatch 0, written 2F0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Versions:
    """Weight versions of an asynchronous schedule. Version 0 is the initial one; version k follows k updates.

    Args:
        reads: for each forward and backward, the version of its stage's weights that it uses.
        writes: for each backward that is followed by an update of its stage, the version that the update creates.
    """

    reads: Mapping[Action, int]
    writes: Mapping[Action, int]

    def __hash__(self) -> int:
        return hash((frozenset(self.reads.items()), frozenset(self.writes.items())))


@dataclass(frozen=True)
class Schedule:
    """Ordered actions of each rank, and the rank of each stage.

    >>> from functional_parallel.schedules import Schedule
    >>> print(Schedule.of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], microbatches=2, name="mine"))
    mine: 2 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0F1  0B0  0B1
    rank 1  1F0  1B0  1F1  1B1

    Args:
        actions: for each rank, its actions in order.
        rank_of_stage: for each stage, the rank that runs it.
        microbatches: number of microbatches per step, over all chains.
        chains: number of copies of the model that run at the same time. Each chain is a range of consecutive stages,
            and all chains have the same length. The microbatches are divided equally among the chains, and each chain
            numbers its microbatches from 0.
        pairs: actions that may overlap with the next action of their rank. Running the two sequentially is also
            correct.
        versions: for an asynchronous schedule, the weight version that each action uses.
        name: name of the schedule.
    """

    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]
    microbatches: int
    chains: int = 1
    pairs: frozenset[Action] = frozenset()
    versions: Versions | None = None
    name: str = field(default="schedule", compare=False)

    @staticmethod
    def of(
        ranks: Iterable[str | Iterable[str | Action]], microbatches: int, *, chains: int = 1, name: str = "schedule"
    ) -> Schedule:
        """Build a schedule from the actions of each rank. A stage belongs to the rank that runs its actions.

        >>> from functional_parallel.schedules import Schedule
        >>> Schedule.of(["0F0 1F0 1B0 0B0"], microbatches=1).rank_of_stage
        (0, 0)

        Args:
            ranks: for each rank its actions in order. They are one text such as "0F0 (0F1;1B0)", a list of texts as
                `rows` returns, or a list of `Action`.
            microbatches: number of microbatches per step, over all chains.
            chains: number of copies of the model that run at the same time.
            name: name of the schedule.

        Returns:
            The schedule; call `check` to verify it.

        Raises:
            ScheduleError: if a text is not an action, two ranks run the same stage, or a stage has no actions.
        """
        actions, pairs = parse_ranks(ranks)
        return Schedule(actions, placement(actions), microbatches, chains, pairs, name=name)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages, over all chains."""
        return len(self.rank_of_stage)

    @property
    def depth(self) -> int:
        """Number of stages of one chain, which are the stages that a microbatch traverses."""
        return self.stages // self.chains

    @property
    def microbatches_of_chain(self) -> int:
        return self.microbatches // self.chains

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.actions for action in row)

    def before(self, stage: int) -> int | None:
        """Return the stage that produces the input of `stage`, or None for the first stage of a chain."""
        return stage - 1 if stage % self.depth else None

    def after(self, stage: int) -> int | None:
        """Return the stage that consumes the output of `stage`, or None for the last stage of a chain."""
        return stage + 1 if (stage + 1) % self.depth else None

    def __repr__(self) -> str:
        return f"Schedule({self.title()})"

    def __str__(self) -> str:
        return f"{self.title()}\n{table(self)}"

    def title(self) -> str:
        chains = f" in {self.chains} chains" if self.chains > 1 else ""
        sizes = (count(self.stages, "stage"), count(self.ranks, "rank"), count(self.microbatches, "microbatch", "es"))
        return "{}: {}{} on {}, {}".format(self.name, sizes[0], chains, *sizes[1:])


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def placement(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but stage {action.stage} lives on rank {found[action.stage]}, which "
                    "runs it before: give all actions of a stage to one rank"
                )
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise ScheduleError(f"stages 0 to {max(found)} are numbered, but no rank runs stage {missing[0]}")
    return tuple(found[stage] for stage in range(len(found)))


def rows(schedule: Schedule) -> list[list[str]]:
    """Return the actions of each rank as text, with overlapped actions as a pair.

    >>> from functional_parallel import schedules
    >>> schedules.rows(schedules.gpipe(2, 1))
    [['0F0', '0B0'], ['1F0', '1B0']]

    Args:
        schedule: any schedule.

    Returns:
        One list per rank, with entries such as "0F3" or "(0F3;3B1)".
    """
    return [_cells(row, schedule.pairs) for row in schedule.actions]


def _cells(row: Sequence[Action], pairs: frozenset[Action]) -> list[str]:
    cells, first = [], None
    for action in row:
        if first is not None:
            cells.append(f"({first};{action})")
            first = None
        elif action in pairs:
            first = action
        else:
            cells.append(str(action))
    return cells


def table(schedule: Schedule) -> str:
    cells = rows(schedule)
    width = max((len(cell) for row in cells for cell in row), default=0)
    digits = len(str(len(cells) - 1))
    return "\n".join(
        f"rank {rank:{digits}}  {'  '.join(cell.ljust(width) for cell in row)}".rstrip()
        for rank, row in enumerate(cells)
    )


def parse_ranks(
    ranks: Iterable[str | Iterable[str | Action]],
) -> tuple[tuple[tuple[Action, ...], ...], frozenset[Action]]:
    if isinstance(ranks, str):
        raise ScheduleError(f"{ranks!r} are the actions of one rank: give a list with a text for each rank")
    actions, pairs = [], []
    for rank, row in enumerate(ranks):
        found: list[Action] = []
        for cell in row.split() if isinstance(row, str) else row:
            pair = _PAIR.fullmatch(cell) if isinstance(cell, str) else None
            if pair:
                pairs.append(_parse(pair[1], rank))
            found += [_parse(part, rank) for part in (pair.groups() if pair else (cell,))]
        actions.append(tuple(found))
    return tuple(actions), frozenset(pairs)


def _parse(text: str | Action, rank: int) -> Action:
    if isinstance(text, tuple) and list(map(type, text)) == [str, int, int]:
        return Action(*text)
    match = _ACTION.fullmatch(text) if isinstance(text, str) else None
    if not match:
        raise ScheduleError(
            f"rank {rank} has {text!r}, which is not an action: write stage, kind and microbatch, as 2F0, or an "
            "overlapped pair, as (0F3;3B1). Kinds: F (forward), B (backward), I (input gradient), W (weight gradient)"
        )
    return Action(match[2], int(match[1]), int(match[3]))
