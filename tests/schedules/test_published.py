"""Numbers that papers and PyTorch print for other machines and other sizes than the tables of `test_tables`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import Costs, Schedule

from .cases import made
from .test_check import received_before_use

TIME = st.integers(1, 12)

# Microbatches, profiled times of F, I, W and of a message, and the share of a step that is bubble under 1F1B, ZB-H1,
# ZB-H2 and the searched schedule with 1F1B's memory: a model of 1.5 billion parameters on 8 ranks (Qi et al. 2024,
# Zero bubble pipeline parallelism, table 5; the values are recalled from it, not read again).
PROFILED = [
    (24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1585)),
    (32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.1242)),
]


@pytest.mark.parametrize(("microbatches", "profile", "rates"), PROFILED, ids=["24", "32"])
def test_bubble_rates_of_a_profiled_model(
    microbatches: int, profile: tuple[float, ...], rates: tuple[float, ...]
) -> None:
    costs = Costs(*profile)
    work = microbatches * sum(profile[:3])
    found = [made(name, 8, microbatches) for name in ("1f1b", "zb-h1", "zb-h2")]
    found.append(schedules.zb_auto(8, microbatches, 8, costs))
    for schedule, rate in zip(found, rates, strict=True):
        span = schedules.simulate(schedule, costs).span_bubble + work
        measured = (span - work) / span
        if schedule.name == "zb-auto":
            assert measured <= rate + 5e-5
        else:
            assert measured == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(("limit", "span"), [(8, 217), (16, 131)])
def test_search_with_messages(limit: int, span: float) -> None:
    """8 ranks, 24 microbatches, F, I, W = 18, 18, 9 and messages of 1: no worse than a published heuristic."""
    costs = Costs(18, 18, 9, latency=1)
    assert schedules.simulate(schedules.zb_auto(8, 24, limit, costs), costs).span_bubble <= span


@given(st.integers(1, 8), st.integers(0, 8), st.lists(TIME, min_size=3, max_size=3, unique=True).map(sorted))
def test_weight_gradients_that_take_longest(ranks: int, more: int, costs: list[int]) -> None:
    """The other side of the formulas' region: ZB-H1 waits for input gradients alone."""
    forward, inputs, weights = costs
    timeline = schedules.simulate(made("zb-h1", ranks, 2 * ranks - 1 + more), Costs(forward, inputs, weights))
    assert timeline.bubble == (ranks - 1) * inputs


@pytest.mark.parametrize("ranks", [12, 16, 24])
def test_controllable_memory_of_deep_pipelines(ranks: int) -> None:
    """Half and a third of 1F1B's memory, in closed form, at 4P microbatches."""
    peaks = {name: max(schedules.peaks(made(name, ranks, 4 * ranks))) for name in ("v-half", "v-min")}
    assert peaks == {
        "v-half": {12: 14, 16: 18, 24: 26}[ranks],
        "v-min": {12: 10, 16: 12, 24: 18}[ranks],
    }


# Whether PyTorch 2.13 gets wrong gradients when it receives right before use, as measured with `defer_pp_recv=True`.
DEFERRED = {
    ("zb-v", 2, 4): True,
    ("dualpipe-v", 2, 4): False,
    ("interleaved", 2, 4): False,
    ("zb-v", 4, 8): True,
    ("dualpipe-v", 4, 8): True,
    ("interleaved", 4, 8): False,
}


@pytest.mark.parametrize("case", DEFERRED, ids=str)
def test_the_rule_of_order_predicts_wrong_gradients(case: tuple[str, int, int]) -> None:
    schedule = made(*case)
    schedules.check_messages(schedule, schedules.messages(schedule))
    assert mixes_up(schedule, received_before_use(schedule)) == DEFERRED[case]


def mixes_up(schedule: Schedule, steps: list[list[object]]) -> bool:
    try:
        schedules.check_messages(schedule, steps)
    except ScheduleError as error:
        return "but the receiver expects" in str(error)
    return False


def test_a_lowered_file_of_pytorch() -> None:
    """What PyTorch writes for ZB-V, 2 ranks and 3 microbatches, with its sends, receives and gathers."""
    lowered = (
        "0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,3SEND_B0,3W0,3F1,3I1,"
        "3SEND_B1,0RECV_B0,3W1,0I0,3RECV_F2,0W0,3F2,3I2,3SEND_B2,0RECV_B1,3W2,3REDUCE_GRAD,0RECV_B2,3RESHARD,0I1,0W1,"
        "0I2,0W2,0REDUCE_GRAD,0RESHARD"
    )
    other = ",".join(map(str, made("zb-v", 2, 3).actions[1]))
    assert schedules.from_csv(f"{lowered}\n{other}\n").actions == made("zb-v", 2, 3).actions
