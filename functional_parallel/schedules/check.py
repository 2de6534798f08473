"""Check that a schedule is complete, ordered and free of deadlock. Errors name the rank, its action and its input."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ScheduleError
from .actions import ACTION_KINDS, Action, Schedule, count
from .predecessors import gradients_of_input, replay, waits_for
from .simulate import Costs, peak_of


def check(schedule: Schedule) -> Schedule:
    """Check that a schedule is complete, ordered and free of deadlock.

    >>> from functional_parallel import schedules
    >>> broken = schedules.Schedule.of(["0F0 0B0", "1B0 1F0"], microbatches=1)
    >>> schedules.check(broken)
    Traceback (most recent call last):
        ...
    functional_parallel.errors.ScheduleError: schedule: rank 1 is stuck at 1B0, its action 0, which waits \
for 1F0, action 1 of the same rank: put 1F0 first

    Completeness: every stage runs F once on every microbatch of its chain, and either B once or I and W once each.
    Order: every action follows the actions that it depends on, within its rank and across ranks. The check replays the
    schedule symbolically, one rank at a time. No cycle of ranks can then deadlock, provided that messages are matched
    correctly (`messages`).

    Args:
        schedule: any schedule, including a user-defined one.

    Returns:
        `schedule`, unchanged.

    Raises:
        ScheduleError: if the schedule is invalid. The message names the rank, the action and the fault.
    """
    _check_sizes(schedule)
    _check_actions(schedule)
    _check_complete(schedule)
    _check_pairs(schedule)
    _check_order(schedule)
    if schedule.versions is not None:
        _check_versions(schedule, schedule.versions.reads, schedule.versions.writes)
    return schedule


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of live activations on each rank, from F to B, or to W if the backward is split.

    >>> from functional_parallel import schedules
    >>> schedules.peaks(schedules.one_f_one_b(4, 8))
    (4, 3, 2, 1)

    Args:
        schedule: any schedule.

    Returns:
        One number per rank, in activations of one microbatch and stage. A rank with several stages sums over them.
    """
    return tuple(int(peak_of(row, Costs())) for row in schedule.actions)


def kept_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of weight versions that each rank of an asynchronous schedule keeps.

    >>> from functional_parallel import schedules
    >>> schedules.kept_versions(schedules.pipedream(4, 16)), schedules.kept_versions(schedules.two_bw(4, 16))
    ((4, 3, 2, 1), (2, 2, 2, 2))

    Args:
        schedule: any schedule; a synchronous one has one version.

    Returns:
        One number per rank: the maximum over its stages. It counts the newest version and all versions that are still
        to be read.
    """
    if schedule.versions is None:
        return (1,) * schedule.ranks
    return tuple(
        max(_versions_of_stage(row, schedule, stage) for stage in {action.stage for action in row})
        for row in schedule.actions
    )


def _versions_of_stage(row: tuple[Action, ...], schedule: Schedule, stage: int) -> int:
    assert schedule.versions is not None
    reads, writes = schedule.versions.reads, schedule.versions.writes
    mine = [action for action in row if action.stage == stage]
    peak, newest = 1, 0
    for position, action in enumerate(mine):
        # An update follows the read of its action. While it is applied, the old version does not need to survive.
        later = {reads[other] for other in mine[position:] if other in reads}
        peak = max(peak, len({version for version in later if version <= newest} | {newest}))
        newest = writes.get(action, newest)
    return peak


def _check_sizes(schedule: Schedule) -> None:
    name = schedule.name
    for number in ("microbatches", "chains"):
        value = getattr(schedule, number)
        if not isinstance(value, int) or (number == "chains" and value < 1):
            raise ScheduleError(f"{name}: {number}={value!r}; it must be an integer of at least 1")
    if not schedule.stages or schedule.stages % schedule.chains:
        raise ScheduleError(f"{name}: {count(schedule.stages, 'stage')} cannot form {schedule.chains} equal chains")
    if schedule.microbatches < 1 or schedule.microbatches % schedule.chains:
        raise ScheduleError(
            f"{name}: {count(schedule.microbatches, 'microbatch', 'es')} cannot be divided equally among "
            f"{count(schedule.chains, 'chain')}"
        )
    for stage, rank in enumerate(schedule.rank_of_stage):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(f"{name}: stage {stage} lives on rank {rank}; the ranks are 0 to {schedule.ranks - 1}")


def _check_actions(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        seen: set[Action] = set()
        for position, action in enumerate(row):
            fault = _fault(schedule, rank, action)
            if action in seen:
                fault = f"which it has run before, as its action {row.index(action)}: run it once"
            if fault:
                raise ScheduleError(f"{schedule.name}: rank {rank} has {action} as its action {position}, {fault}")
            seen.add(action)


def _fault(schedule: Schedule, rank: int, action: Action) -> str | None:
    if action.kind not in ACTION_KINDS:
        return f"but {action.kind!r} is not a kind of action: the kinds are {', '.join(ACTION_KINDS)}"
    if not 0 <= action.stage < schedule.stages:
        return f"but the stages are 0 to {schedule.stages - 1}"
    if schedule.rank_of_stage[action.stage] != rank:
        return f"but stage {action.stage} lives on rank {schedule.rank_of_stage[action.stage]}: move it there"
    if not 0 <= action.microbatch < schedule.microbatches_of_chain:
        return f"but the microbatches are 0 to {schedule.microbatches_of_chain - 1}"
    return None


def _check_complete(schedule: Schedule) -> None:
    every = set(schedule)
    for stage, rank in enumerate(schedule.rank_of_stage):
        for m in range(schedule.microbatches_of_chain):
            kinds = "".join(kind for kind in ACTION_KINDS if Action(kind, stage, m) in every)
            if kinds in ("FB", "FIW"):
                continue
            where = f"{schedule.name}: rank {rank} runs " + (" and ".join(f"{stage}{k}{m}" for k in kinds) or "nothing")
            raise ScheduleError(
                f"{where} for stage {stage} and microbatch {m}; it has to run {stage}F{m}, and either {stage}B{m} or "
                f"both {stage}I{m} and {stage}W{m}"
            )


def _check_pairs(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action not in schedule.pairs:
                continue
            other = row[position + 1] if position + 1 < len(row) else None
            if action.kind != "F" or other is None or other.kind not in "BI" or other.stage == action.stage:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} overlaps {action} with {other}; only a forward and the backward "
                    "of another stage right after it may overlap"
                )


def _check_order(schedule: Schedule) -> None:
    positions = [0] * schedule.ranks
    done = set()
    for rank, action in replay(schedule):
        positions[rank] += 1
        done.add(action)
    stuck = [rank for rank, row in enumerate(schedule.actions) if positions[rank] < len(row)]
    if not stuck:
        return
    kinds = gradients_of_input(schedule)
    waits = []
    for rank in stuck:
        action = schedule.actions[rank][positions[rank]]
        missing = next(earlier for earlier in waits_for(schedule, kinds, action) if earlier not in done)
        owner = schedule.rank_of_stage[missing.stage]
        wait = (
            f"rank {rank} is stuck at {action}, its action {positions[rank]}, which waits for {missing}, action "
            f"{schedule.actions[owner].index(missing)} of"
        )
        if owner == rank:
            raise ScheduleError(f"{schedule.name}: {wait} the same rank: put {missing} first")
        waits.append(f"{wait} rank {owner}")
    told = "; ".join(waits)
    raise ScheduleError(f"{schedule.name}: these ranks wait for each other: {told}. Move one awaited action up")


def _check_versions(schedule: Schedule, reads: Mapping[Action, int], writes: Mapping[Action, int]) -> None:
    for rank, row in enumerate(schedule.actions):
        newest = dict.fromkeys(range(schedule.stages), 0)
        for action in row:
            version = reads.get(action)
            if action.kind != "W" and (version is None or not 0 <= version <= newest[action.stage]):
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} reads version {version} of stage {action.stage} in {action}, when "
                    f"the newest is {newest[action.stage]}"
                )
            forward = Action("F", *action[1:])
            if reads.get(forward) != reads.get(action, reads.get(forward)):
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} reads version {version} in {action} but {reads[forward]} in "
                    f"{forward}: a backward needs the weights of its forward"
                )
            if action in writes and writes[action] != newest[action.stage] + 1:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} makes version {writes[action]} of stage {action.stage} after "
                    f"{action}, when the newest is {newest[action.stage]}"
                )
            newest[action.stage] = writes.get(action, newest[action.stage])
