"""A broken schedule is an error that names rank, action and what it waits for; no random breakage gets through."""

from __future__ import annotations

import dataclasses
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import Action, Receive, Schedule, Send, Versions

from .cases import drawn, made


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return dataclasses.replace(schedule, actions=tuple(rows), pairs=frozenset())


def site(data: st.DataObject, schedule: Schedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.actions[rank]) - 1))


@given(st.data(), drawn())
def test_a_dropped_action_is_caught(data: st.DataObject, schedule: Schedule) -> None:
    rank, position = site(data, schedule)
    row = list(schedule.actions[rank])
    gone = row.pop(position)
    with pytest.raises(
        ScheduleError, match=rf"rank {rank} runs .*stage {gone.stage} and microbatch {gone.microbatch};"
    ):
        schedules.check(changed(schedule, rank, row))


@given(st.data(), drawn())
def test_a_repeated_action_is_caught(data: st.DataObject, schedule: Schedule) -> None:
    rank, position = site(data, schedule)
    row = list(schedule.actions[rank])
    action = row[position]
    row.insert(data.draw(st.integers(0, len(row))), action)
    message = rf"rank {rank} has {action} .* it has run before, as its action \d+: run it once"
    with pytest.raises(ScheduleError, match=message):
        schedules.check(changed(schedule, rank, row))


@given(st.data(), drawn())
def test_an_action_ahead_of_what_it_uses_is_caught(data: st.DataObject, schedule: Schedule) -> None:
    """A backward before its own forward, or a weight gradient before its input's, is what a rank sees by itself."""
    rank, position = site(data, schedule)
    row = list(schedule.actions[rank])
    action = row[position]
    assume(action.kind != "F")
    earlier = Action("I" if action.kind == "W" else "F", *action[1:])
    del row[position]
    row.insert(data.draw(st.integers(0, row.index(earlier))), action)
    with pytest.raises(ScheduleError, match=r"rank \d is stuck at .*, which waits for "):
        schedules.check(changed(schedule, rank, row))


def runs(schedule: Schedule) -> bool:
    """Whether the actions have an order at all: by sorting, where the checker replays."""
    kinds = {(action.stage, action.microbatch): action.kind for action in schedule if action.kind in "BI"}
    graph: dict[Action, set[Action]] = {action: set() for action in schedule}
    for row in schedule.actions:
        for earlier, later in pairwise(row):
            graph[later].add(earlier)
    for kind, stage, m in schedule:
        action, last = Action(kind, stage, m), (stage + 1) % (schedule.stages // schedule.chains) == 0
        first = stage % (schedule.stages // schedule.chains) == 0
        if kind == "F" and not first:
            graph[action].add(Action("F", stage - 1, m))
        if kind in "BI":
            graph[action] |= {Action("F", stage, m)} | (set() if last else {Action(kinds[stage + 1, m], stage + 1, m)})
        if kind == "W":
            graph[action].add(Action("I", stage, m))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@given(st.data(), drawn(least_ranks=2))
def test_swapped_actions_are_caught_exactly_when_nothing_can_run(data: st.DataObject, schedule: Schedule) -> None:
    rank, one = site(data, schedule)
    other = data.draw(st.integers(0, len(schedule.actions[rank]) - 1))
    row = list(schedule.actions[rank])
    row[one], row[other] = row[other], row[one]
    broken = dataclasses.replace(changed(schedule, rank, row), versions=None)
    if runs(broken):
        schedules.check(broken)
        schedules.check_messages(broken, schedules.messages(broken))
        return
    with pytest.raises(ScheduleError, match="stuck at"):
        schedules.check(broken)
    with pytest.raises(ScheduleError, match="its ranks wait for each other"):
        schedules.messages(broken)
    with pytest.raises(ScheduleError, match="its ranks wait for each other"):
        schedules.simulate(broken)


@given(st.data(), drawn(least_ranks=2))
def test_an_action_on_another_rank_is_caught(data: st.DataObject, schedule: Schedule) -> None:
    rank, position = site(data, schedule)
    to = data.draw(st.integers(0, schedule.ranks - 1).filter(lambda other: other != rank))
    action = schedule.actions[rank][position]
    moved = changed(schedule, rank, [other for other in schedule.actions[rank] if other != action])
    moved = changed(moved, to, [*schedule.actions[to], action])
    with pytest.raises(
        ScheduleError, match=f"rank {to} has {action} .*, but stage {action.stage} lives on rank {rank}"
    ):
        schedules.check(moved)


def test_a_cycle_of_ranks_names_each() -> None:
    broken = Schedule.of(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"], microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        schedules.check(broken)
    assert "rank 0 is stuck at 0B0, its action 1, which waits for 1B0, action 2 of rank 1" in str(caught.value)
    assert "rank 1 is stuck at 1F1, its action 0, which waits for 0F1, action 2 of rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0F0 0I0"],
            "rank 0 runs 0F0 and 0I0 for stage 0 and microbatch 0; .* 0F0, and either 0B0 or both 0I0 and 0W0",
        ),
        (["0F0 0B0 0W0"], "rank 0 runs 0F0 and 0B0 and 0W0"),
        (["0F0 0B0 0F1 0B1"], "rank 0 has 0F1 as its action 2, but the microbatches are 0 to 0"),
        (["0B0 0F0"], "rank 0 is stuck at 0B0, its action 0, which waits for 0F0, action 1 of the same rank: put 0F0"),
        (["(0B0;0F0)"], "rank 0 overlaps 0B0 with 0F0"),
        (["(0F0;0B0)"], "rank 0 overlaps 0F0 with 0B0"),
    ],
)
def test_small_faults(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedules.check(Schedule.of(rows, microbatches=1))


def test_sizes_that_do_not_fit() -> None:
    good = made("gpipe", 2, 4)
    for wrong, message in (
        ({"chains": 3}, "2 stages cannot form 3 equal chains"),
        ({"chains": 0}, "chains=0; it must be an integer of at least 1"),
        ({"microbatches": "4"}, "microbatches='4'; it must be an integer"),
        ({"microbatches": 0}, "0 microbatches cannot be divided equally among 1 chain"),
        ({"rank_of_stage": (0, 5)}, "stage 1 lives on rank 5; the ranks are 0 to 1"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedules.check(dataclasses.replace(good, **wrong))
    odd = dataclasses.replace(good, actions=((Action("X", 0, 0),), ()))
    with pytest.raises(ScheduleError, match="'X' is not a kind of action: the kinds are F, B, I, W"):
        schedules.check(odd)
    with pytest.raises(ScheduleError, match=r"rank 1 runs 0B0, but stage 0 lives on rank 0"):
        Schedule.of(["0F0", "0B0"], microbatches=1)
    with pytest.raises(ScheduleError, match="no rank runs stage 1"):
        Schedule.of(["0F0 2F0"], microbatches=1)
    with pytest.raises(ScheduleError, match="rank 0 has '0F1junk', which is not an action"):
        Schedule.of(["0F1junk"], microbatches=1)
    with pytest.raises(ScheduleError, match=r"rank 0 has \(0, 'F', 0\), which is not an action"):
        Schedule.of([[(0, "F", 0)]], microbatches=1)  # type: ignore[list-item]
    with pytest.raises(ScheduleError, match="actions of one rank: give a list"):
        Schedule.of("0F0 0B0", microbatches=1)


@given(drawn())
def test_rows_are_read_again(schedule: Schedule) -> None:
    again = Schedule.of(schedules.rows(schedule), schedule.microbatches, chains=schedule.chains)
    assert dataclasses.replace(again, versions=schedule.versions) == schedule


# -----------------------------------------------------------------------------
# Messages
# -----------------------------------------------------------------------------


def received_before_use(schedule: Schedule) -> list[list[object]]:
    """Each receive right before the action that uses it: what one would write first."""
    placed = [[step for step in row if not isinstance(step, Receive)] for row in schedules.messages(schedule)]
    for rank, row in enumerate(schedules.messages(schedule)):
        for step in (step for step in row if isinstance(step, Receive)):
            _, stage, m = step.action
            to = stage + 1 if step.action.kind == "F" else stage - 1
            users = [Action("F", to, m)] if step.action.kind == "F" else [Action("B", to, m), Action("I", to, m)]
            position = next(index for index, other in enumerate(placed[rank]) if other in users)
            placed[rank].insert(position, step)
    return placed


@pytest.mark.parametrize("numbers", [(4, 8), (8, 16)])
def test_messages_must_be_received_as_they_were_sent(numbers: tuple[int, int]) -> None:
    """Receiving right before the use gives wrong numbers for folded schedules, unless messages are tagged."""
    for name in ("zb-v", "dualpipe-v"):
        schedule = made(name, *numbers)
        naive = received_before_use(schedule)
        with pytest.raises(ScheduleError, match=r"message \d+ from rank \d to rank \d is \d+\w\d+, but the receiver"):
            schedules.check_messages(schedule, naive)
        schedules.check_messages(schedule, naive, tagged=True)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "looped-bfs"])
def test_sends_that_wait_hang_when_received_before_use(name: str) -> None:
    schedule = made(name, 4, 8)
    with pytest.raises(ScheduleError, match=r"no rank can continue: rank 0 at send"):
        schedules.check_messages(schedule, received_before_use(schedule))


def test_messages_come_in_pairs() -> None:
    schedule = made("gpipe", 2, 2)
    steps = [list(row) for row in schedules.messages(schedule)]
    lost = [steps[0], [step for step in steps[1] if step != Receive(Action("F", 0, 1), 0)]]
    with pytest.raises(ScheduleError, match="rank 0 sends 2 messages to rank 1, which receives 1, and 0F1"):
        schedules.check_messages(schedule, lost)
    neither = [[step for step in row if getattr(step, "action", None) != Action("F", 0, 1)] for row in steps]
    with pytest.raises(ScheduleError, match="no rank can continue: rank 0 at receive 1B0 from 1; rank 1 at 1F1"):
        schedules.check_messages(schedule, neither)


def test_stages_of_one_rank_need_no_message() -> None:
    steps = schedules.messages(made("zb-v", 3, 6))
    sends = [step for row in steps for step in row if isinstance(step, Send)]
    assert len(sends) == 2 * 6 * 4  # forward and back, six microbatches, five cuts less the one at the fold
    assert all(isinstance(step, Action) for row in schedules.messages(made("looped-bfs", 1, 4, 3)) for step in row)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *[(name, 48) for name in ("naive", "gpipe", "1f1b", "zb-h2")],
        *[(name, 112) for name in ("interleaved", "looped-bfs")],
        *[(name, 96) for name in ("zb-v", "v-half", "v-min", "dualpipe-v")],
    ],
)
def test_number_of_messages(name: str, number: int) -> None:
    """One per microbatch, way and boundary between ranks; a rank's own stages need none."""
    assert sum(isinstance(step, Send) for row in schedules.messages(made(name, 4, 8)) for step in row) == number


# -----------------------------------------------------------------------------
# Versions of weights
# -----------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 16))
def test_delays_and_versions_kept(ranks: int, microbatches: int) -> None:
    """Weight stashing: P − 1 − s updates old, P − s versions; vertical sync: P − 1 old and P versions everywhere."""
    stashed = schedules.pipedream(ranks, microbatches)
    synced = schedules.check(schedules.pipedream(ranks, microbatches, vertical_sync=True))
    for stage in range(ranks):
        for m in range(microbatches):
            for kind in "FB":
                assert stashed.versions.reads[Action(kind, stage, m)] == max(0, m - (ranks - 1 - stage))
                assert synced.versions.reads[Action(kind, stage, m)] == max(0, m - (ranks - 1))
            assert stashed.versions.writes[Action("B", stage, m)] == m + 1
    if microbatches >= 2 * ranks:
        assert schedules.kept_versions(stashed) == tuple(range(ranks, 0, -1))
        assert schedules.kept_versions(synced) == (ranks,) * ranks
    assert schedules.kept_versions(schedules.gpipe(ranks, microbatches)) == (1,) * ranks


@given(st.integers(2, 8), st.integers(0, 4), st.integers(3, 5))
def test_two_versions_are_kept(ranks: int, more: int, batches: int) -> None:
    size = ranks + more
    schedule = schedules.check(schedules.two_bw(ranks, batches * size, batch=size))
    assert schedules.kept_versions(schedule) == (2,) * ranks
    assert {schedule.versions.reads[Action("F", s, 2 * size)] for s in range(ranks)} == {1}


def test_a_version_that_is_not_there_is_caught() -> None:
    good = schedules.pipedream(4, 8)
    first, back = Action("F", 0, 4), Action("B", 0, 4)
    reads, writes = dict(good.versions.reads), dict(good.versions.writes)
    for wrong, message in (
        (
            Versions(reads | {first: 2, back: 2}, writes),
            "rank 0 reads version 2 of stage 0 in 0F4, when the newest is 1",
        ),
        (Versions(reads | {back: 2}, writes), "rank 0 reads version 2 in 0B4 but 1 in 0F4: a backward needs"),
        (Versions(reads, writes | {back: 9}), "rank 0 makes version 9 of stage 0 after 0B4, when the newest is 4"),
        (Versions({k: v for k, v in reads.items() if k != first}, writes), "reads version None of stage 0 in 0F4"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedules.check(dataclasses.replace(good, versions=wrong))


def test_too_few_microbatches_per_update_need_a_third_version() -> None:
    """4 stages that update every 2 microbatches would read version 1 of a batch before it is made."""
    size, good = 2, schedules.two_bw(4, 8)
    reads = {action: max(0, action.microbatch // size - 1) for action in good.versions.reads}
    writes = {Action("B", s, m): (m + 1) // size for s in range(4) for m in range(size - 1, 8, size)}
    with pytest.raises(ScheduleError, match="rank 0 reads version 1 of stage 0 in 0F4, when the newest is 0"):
        schedules.check(dataclasses.replace(good, versions=Versions(reads, writes)))
