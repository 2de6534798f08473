"""What a pipeline takes on real ranks is what the simulator says.

The work is sleep, of known length: so the times are those of the machine's clock, however busy its cores are.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.schedules import Costs
from sharding_specs import Mesh

from ..processes import run_on_processes

FORWARD, INPUT, WEIGHT = 0.05, 0.06, 0.03


_LIBRARY = torch.library.Library("tests_pipelines", "DEF")
_LIBRARY.define("sleep(Tensor x, float seconds) -> Tensor")
_LIBRARY.define("slow_product(Tensor x, Tensor w) -> Tensor")


def _sleep(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


def _slow_product(x: Tensor, w: Tensor) -> Tensor:
    time.sleep(FORWARD)
    return x @ w


_LIBRARY.impl("sleep", _sleep, "CPU")
_LIBRARY.impl("sleep", lambda x, _: torch.empty_like(x), "Meta")
_LIBRARY.impl("slow_product", _slow_product, "CPU")
_LIBRARY.impl("slow_product", torch.mm, "Meta")
sleep, slow_product = torch.ops.tests_pipelines.sleep, torch.ops.tests_pipelines.slow_product


class SlowProduct(torch.autograd.Function):
    """The product whose gradients take their time too, each by itself."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return slow_product(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return sleep(grad, INPUT) @ w.T, x.T @ sleep(grad, WEIGHT)


fp.register_rule(slow_product, "b i, i j -> b j", function=SlowProduct.apply)


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for stage, weight in enumerate(params):
        x = fp.stage_boundary(x) if stage else x
        x = SlowProduct.apply(x, weight)
    return (x**2).sum()


def ran(rank: int, names: list[str], microbatches: int) -> dict[str, tuple[list[list[str]], float]]:
    """Per schedule the actions of each rank in the order in which they ran, and the makespan."""
    found = {}
    for name in names:
        schedule = schedules.for_ranks(name, 2, microbatches)
        params = [torch.eye(3)] * schedule.depth
        plan = fp.pipeline("pipe", schedule=schedule, microbatches=microbatches)
        step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2))
        program = step.lower(params, torch.ones(microbatches, 3))
        step(params, torch.ones(microbatches, 3))
        timelines = []
        for _ in range(4):  # the fastest counts: on a busy machine a rank may wake up late
            program.record()
            step(params, torch.ones(microbatches, 3))
            timelines.append(program.timeline())
        timeline = min(timelines, key=lambda each: each.makespan)
        order = [[str(event.action) for event in sorted(row, key=lambda each: each.start)] for row in timeline.events]
        found[name] = order, timeline.makespan
    return found


def test_order_and_makespan_on_two_processes() -> None:
    """The order is the schedule's and the makespan within 15 %, of an unsplit, a split and a folded schedule."""
    names, microbatches = ["1f1b", "zb-h1", "zb-v"], 6
    for found in run_on_processes(ran, 2, names, microbatches, timeout=300):
        for name, (order, makespan) in found.items():
            schedule = schedules.for_ranks(name, 2, microbatches)
            assert order == [[str(action) for action in row] for row in schedule.actions]
            of_input = [0.0] + [INPUT] * (schedule.depth - 1)  # nobody asks for the batch's gradient
            timeline = schedules.simulate(schedule, Costs(FORWARD, of_input, WEIGHT))
            assert makespan == pytest.approx(timeline.makespan, rel=0.15), name
