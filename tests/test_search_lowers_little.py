"""The search lowers no more than what is read of its answer, and finds what lowering every plan would find."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.schedules import Machine
from functional_parallel.training.step import TrainStep


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = x + torch.tanh(x @ weight)
    return x.square().mean()


PARAMS, X = [torch.empty(4, 4, device="meta") for _ in range(5)], torch.empty(4, 4, device="meta")
OPTIMIZER = fp.optim.adamw(1e-3)
NAMES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half"]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The training steps that are lowered from now on."""
    found: list[Any] = []
    lower = TrainStep.lower

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        found.append(lower(self, *args, **named))
        return found[-1]

    monkeypatch.setattr(TrainStep, "lower", counted)
    return found


def search(limit: float = 1e9, ranks: int = 4, **options: Any) -> Any:
    machine = Machine(ranks, memory=limit, overhead=1e-6)
    return fp.search_pipeline(loss, PARAMS, X, machine=machine, optimizer=OPTIMIZER, **{"names": NAMES, **options})


def exact_peak(choice: fp.PipelineChoice) -> int:
    step = fp.train_step(loss, OPTIMIZER, choice.mesh, choice.transform)
    peak: int = step.lower(PARAMS, X).memory().peak
    return peak


def test_choices_are_those_of_lowering_every_plan() -> None:
    names = ["1f1b", "zb-v"]
    every = search(math.inf, ranks=2, names=names)
    peaks = {choice.plan: exact_peak(choice) for choice in every}
    assert [choice.plan for choice in search(1e9, ranks=2, names=names, most=len(every))] == list(peaks)
    limit = sorted(peaks.values())[len(peaks) // 3]
    wanted = [plan for plan, peak in peaks.items() if max(peak, plan.memory) <= limit]
    found = search(limit, ranks=2, names=names, most=len(every))
    assert {choice.plan: choice.memory().peak for choice in found} == {plan: peaks[plan] for plan in wanted}
    assert [choice.plan for choice in found] == wanted


def test_what_is_far_below_the_limit_is_not_lowered(lowered: list[Any]) -> None:
    found = search()
    assert len(found) == 8 and not lowered
    assert found[0].memory().peak < 1e9 and len(lowered) == 1


def test_choices_are_lowered_when_they_are_read(lowered: list[Any]) -> None:
    limit = 2 * max(choice.plan.memory for choice in search(math.inf))  # so near that every choice is lowered
    found = search(limit)
    assert len(lowered) == 1
    first = found[0]
    assert found[:1] == [first] and len(lowered) == 1
    second = found[1]
    assert len(lowered) <= 2 and found[:2] == [first, second] and "not lowered yet" in repr(found)
    assert len(found) == 8 == len(list(found)) and found[-1] is found[7] and "not lowered" not in repr(found)


def test_schedules_that_differ_in_order_share_a_program(lowered: list[Any]) -> None:
    found = search(names=["gpipe", "1f1b", "eager-1f1b"], most=100)
    assert not lowered
    for choice in found:
        choice.memory()
    programs = {(choice.mesh, choice.plan.microbatch) for choice in found}
    assert len(lowered) == len(programs) < len(found)


def test_progress_is_reported_after_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    found = search(progress=lines.append)
    assert len(lines) == 3 and lines[0].startswith("measured ") and lines[1].startswith("simulated ")
    assert repr(found[0].plan) in lines[2] and "fits" in lines[2]
    search()
    assert capsys.readouterr().err == ""  # it is not a terminal
    search(progress=True)
    assert re.match(r"search_pipeline, \d+\.\d s: measured", capsys.readouterr().err)
