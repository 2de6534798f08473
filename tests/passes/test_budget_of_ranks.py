"""A budget in a pipeline: the peak of each rank fits, the numbers stay, and a rank recomputes what it must."""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.program.work import recompute_cost
from sharding_specs import Mesh

from ..pipelines.test_memory import OneRank

SCHEDULES = ["1f1b", "interleaved", "gpipe"]
PLANS = {"zero 1": fp.zero(1, "data"), "zero 3": fp.zero(3, "data")}


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x + torch.relu(torch.relu(x @ layer["a"]) @ layer["b"])
        x = x.clamp(-3, 3)
    return x.square().sum()


def arguments() -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).double()

    return {"layers": [{"a": draw(4, 16), "b": draw(16, 4)} for _ in range(4)]}, draw(256, 4)


def step(schedule: str, plan: str, *first: Any) -> Any:
    pipeline = fp.pipeline("pipe", schedule=schedule, microbatches=4)
    return fp.compile(fp.grad_and_value(fp.chain(*first, PLANS[plan], pipeline)(loss)), Mesh(pipe=2, data=2))


@cache
def bounds(schedule: str, plan: str) -> tuple[int, int]:
    """The lowest peak that is reached, and that without recomputation."""
    with pytest.raises(fp.BudgetError, match="of the pipeline") as caught:
        step(schedule, plan, fp.remat(budget=1)).lower(*arguments())
    low = int(str(caught.value).split("reaches is ")[1].split()[0])
    return low, step(schedule, plan).lower(*arguments()).memory().peak


def again(program: Any) -> int:
    works = (work.first.program for stage in program.stages for work in stage.works.values())
    copies = [(n, part.mesh) for part in works for n in part.traced.nodes if info(n).recomputed]
    return sum(recompute_cost(node, mesh) for node, mesh in copies if "all_gather" not in str(node.target))


@settings(max_examples=3)
@given(st.sampled_from(SCHEDULES), st.sampled_from(sorted(PLANS)), st.floats(0, 1))
def test_every_rank_fits_and_the_bits_stay(schedule: str, plan: str, fraction: float) -> None:
    low, high = bounds(schedule, plan)
    budget = round(low + fraction * (high - low))
    chosen = step(schedule, plan, fp.remat(budget=budget))
    found, wanted = chosen(*arguments()), fp.grad_and_value(loss)(*arguments())
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, found, wanted)))
    assert low < high
    for rank, memory in enumerate(chosen.program.memory().ranks):
        assert OneRank(chosen.program, rank).peak() == memory.peak <= budget


def test_a_looser_budget_never_computes_more_again() -> None:
    low, high = bounds("1f1b", "zero 1")
    budgets = [low, (low + high) // 2, high]
    programs = [step("1f1b", "zero 1", fp.remat(budget=budget)).lower(*arguments()) for budget in budgets]
    costs = [again(program) for program in programs]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    assert "every residual is saved" in str(programs[-1].notes)
    assert "computed again: " in str(programs[0].explain())


def test_a_rank_with_room_computes_nothing_again() -> None:
    """Rank 0 of 1F1B has two microbatches in flight, rank 1 one."""
    memory = step("1f1b", "zero 1").lower(*arguments()).memory()
    budget = (memory.ranks[0].peak + memory.ranks[1].peak) // 2
    program = step("1f1b", "zero 1", fp.remat(budget=budget)).lower(*arguments())
    counts = [
        sum(
            info(node).recomputed and not info(node).is_cheap_copy
            for node in stage.works["B"].first.program.traced.nodes
        )
        for stage in program.stages
    ]
    assert counts[0] > 0 == counts[1]
