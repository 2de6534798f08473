"""PyTorch's CSV: ours read back is the same, PyTorch reads ours, and its own schedules are ours action for action."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import FAMILIES, Schedule

from .cases import drawn, in_domain, made


@given(drawn())
def test_round_trip(schedule: Schedule) -> None:
    assert schedules.from_csv(schedules.to_csv(schedule), chains=schedule.chains) == schedule


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_of_every_schedule(name: str) -> None:
    """Versions of weights included; 4 ranks and 16 microbatches are in the domain of all."""
    schedule = made(name, 4, 16)
    assert schedules.from_csv(schedules.to_csv(schedule), chains=schedule.chains) == schedule


def test_round_trip_of_versions_beside_overlapped_actions() -> None:
    order = made("pipedream", 2, 4)
    schedule = replace(order, pairs=frozenset({order.actions[0][1], order.actions[1][0]}))
    assert schedules.from_csv(schedules.to_csv(schedule)) == schedule


def test_a_cell_with_a_broken_version() -> None:
    for cell in ("0F0@x", "0F0>1", "0F0@1>"):
        with pytest.raises(ScheduleError, match=re.escape(f"rank 0 has '{cell}', which is not an action")):
            schedules.from_csv(f"{cell},0B0\n")


@given(drawn())
def test_text_round_trip(schedule: Schedule) -> None:
    back = Schedule.of(map(" ".join, schedules.rows(schedule)), schedule.microbatches, chains=schedule.chains)
    assert (back.actions, back.pairs) == (schedule.actions, schedule.pairs)


def test_waiting_and_communication_are_passed_over() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,1RECV_B0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0, 1F0 ,1B0,1SEND_B0\n"
    assert schedules.rows(schedules.check(schedules.from_csv(text))) == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_a_cell_that_is_no_action() -> None:
    with pytest.raises(ScheduleError, match="rank 1 has '1G0', which is not an action"):
        schedules.from_csv("0F0,0B0\n1G0\n")


# -----------------------------------------------------------------------------
# PyTorch's own schedules
# -----------------------------------------------------------------------------

NUMBERS = [(2, 4), (4, 4), (4, 8), (4, 10), (4, 12), (8, 16), (8, 32)]


class _Stage:
    """What PyTorch's constructors ask of a stage."""

    def __init__(self, rank: int, ranks: int, index: int, stages: int) -> None:
        self.group_rank, self.group_size, self.stage_index, self.num_stages = rank, ranks, index, stages
        self.has_backward, self.is_first, self.is_last = True, index == 0, index == stages - 1
        self.device, self.submod, self.stage_index_to_group_rank = None, None, {}

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


def of_torch(name: str, ranks: int, microbatches: int, chunks: int = 2) -> object:
    """PyTorch's schedule, made on rank 0."""
    stages = ranks * chunks
    own = [_Stage(0, ranks, index, stages) for index in range(0, stages, ranks)]
    if name in ("ZBVZeroBubble", "DualPipeV"):
        own = [_Stage(0, ranks, index, stages) for index in (0, stages - 1)]
    return getattr(torch_schedules, f"Schedule{name}")(own, microbatches, loss_fn=lambda *_: None)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("interleaved", "Interleaved1F1B"),
        ("zb-v", "ZBVZeroBubble"),
        ("dualpipe-v", "DualPipeV"),
        ("looped-bfs", "LoopedBFS"),
    ],
)
def test_equal_to_their_export(name: str, theirs: str, numbers: tuple[int, int], tmp_path: object) -> None:
    if not in_domain(name, *numbers):
        with pytest.raises(ScheduleError):
            made(name, *numbers)
        return
    file = tmp_path / "schedule.csv"
    of_torch(theirs, *numbers)._dump_csv(str(file), format="compute_only")
    read = schedules.check(schedules.from_csv(file.read_text()))
    assert read.actions == made(name, *numbers).actions
    assert read.pairs == made(name, *numbers).pairs


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("name", "theirs"), [("interleaved", "Interleaved1F1B"), ("looped-bfs", "LoopedBFS")])
def test_equal_to_their_export_at_other_depths(
    name: str, theirs: str, chunks: int, numbers: tuple[int, int], tmp_path: object
) -> None:
    file = tmp_path / "schedule.csv"
    of_torch(theirs, *numbers, chunks)._dump_csv(str(file), format="compute_only")
    eager = name == "interleaved" and chunks == 1  # with one stage per rank, theirs warms up twice as long as ours
    wanted = made("eager-1f1b" if eager else name, *numbers, chunks)
    assert schedules.from_csv(file.read_text()).actions == wanted.actions


@pytest.mark.parametrize("numbers", NUMBERS)
def test_their_zero_bubble_of_one_stage_per_rank_is_h1(numbers: tuple[int, int], tmp_path: object) -> None:
    file = tmp_path / "schedule.csv"
    of_torch("InterleavedZeroBubble", *numbers, chunks=1)._dump_csv(str(file), format="compute_only")
    assert schedules.from_csv(file.read_text()).actions == made("zb-h1", *numbers).actions


@given(drawn())
def test_they_read_our_cells(schedule: Schedule) -> None:
    for row, cells in zip(schedule.actions, csv.reader(io.StringIO(schedules.to_csv(schedule))), strict=True):
        theirs = [torch_schedules._Action.from_str(cell) for cell in cells]
        assert [repr(action) for action in theirs] == [re.sub(r"@[\d>]*", "", cell) for cell in cells]
        parts = [part for action in theirs for part in (action.sub_actions or (action,))]
        assert [(part.stage_index, part.microbatch_index) for part in parts] == [action[1:] for action in row]
