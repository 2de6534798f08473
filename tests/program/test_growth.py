"""Queries of a program take work in proportion to its length: counted in bytecode instructions, not in seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

PLANS = {
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "accumulated": (fp.chain(fp.zero(2, "data"), fp.accumulate(4)), Mesh(data=2)),
    "pipeline": (fp.pipeline("pipe", microbatches=4), Mesh(pipe=2)),
}
QUERIES: dict[str, Callable[[Any], object]] = {
    "memory": lambda program: program.memory(),
    "price": lambda program: program.price(),
    "explain": lambda program: str(program.explain()),
    "lines": lambda program: program.lines(),
}


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().mean()


def lowered(plan: str, layers: int) -> Any:
    transform, mesh = PLANS[plan]
    params = [torch.empty(4, 4, device="meta")] * layers
    return fp.compile(fp.grad(transform(loss)), mesh).lower(params, torch.empty(8, 4, device="meta"))


def instructions(query: Callable[[Any], object], program: Any) -> int:
    """The bytecode instructions that a query executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        query(program)
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("plan", PLANS)
def test_work_of_queries_doubles_with_the_layers(plan: str) -> None:
    """The first layers fill caches of op schemas; the bound is far below the 4 of a quadratic query."""
    first, small, large = (lowered(plan, layers) for layers in (2, 4, 8))
    gc.collect()  # now, and not while instructions are counted
    for name, query in QUERIES.items():
        query(first)
        ratio = instructions(query, large) / instructions(query, small)
        assert ratio < 2.1, f"{name} of twice the layers takes {ratio:.2f} times the instructions"
