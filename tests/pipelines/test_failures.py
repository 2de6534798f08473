"""Nothing hangs: what is wrong on all ranks is an error on all, and what is wrong on one ends the others' wait."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from sharding_specs import Mesh

from ..processes import run_on_processes
from .test_cuts import BAD, FOUR, X, chain_of, run

PATIENCE = 10.0
_LIBRARY = torch.library.Library("tests_failures", "DEF")
_LIBRARY.define("perhaps_fail(Tensor x, int stage) -> Tensor")
failing: list[int] = []


def _perhaps_fail(x: Tensor, stage: int) -> Tensor:
    if stage in failing:
        raise RuntimeError(f"no memory for the kernel of stage {stage}")
    return x.clone()


_LIBRARY.impl("perhaps_fail", _perhaps_fail, "CPU")
_LIBRARY.impl("perhaps_fail", lambda x, _: torch.empty_like(x), "Meta")
perhaps_fail = torch.ops.tests_failures.perhaps_fail


class PerhapsFail(torch.autograd.Function):
    """The identity, until its stage is told to fail."""

    @staticmethod
    def forward(x: Tensor, stage: int) -> Tensor:
        return perhaps_fail(x, stage)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


fp.register_rule(perhaps_fail, "~... -> ...", function=PerhapsFail.apply)


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for stage, weight in enumerate(params):
        x = fp.stage_boundary(x) if stage else x
        x = PerhapsFail.apply(torch.tanh(x @ weight), stage)
    return (x**2).sum()


def error_and_time(call: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def on_two(rank: int) -> tuple[dict[str, Any], dict[str, Any], tuple[str, str, float]]:
    use_runtime(ProcessRuntime(Mesh(pipe=2), timeout=PATIENCE))
    bad = {case: error_and_time(call) for case, (call, _) in BAD.items()}
    apart = {
        "schedules": error_and_time(lambda: run(chain_of(4), FOUR, X, schedule=("gpipe", "1f1b")[rank])),
        "microbatches": error_and_time(lambda: run(chain_of(4), FOUR, X, microbatches=(2, 4)[rank])),
        "layers": error_and_time(lambda: run(chain_of(4), FOUR[: 4 - rank], X)),
    }
    step = fp.compile(fp.grad_and_value(fp.pipeline("pipe", schedule="zb-h1", microbatches=4)(loss)), Mesh(pipe=2))
    step(FOUR[:2], X)
    failing.append(1)
    return bad, apart, error_and_time(lambda: step(FOUR[:2], X))


def test_on_two_processes() -> None:
    (bad, apart, waiting), (also_bad, also_apart, failed) = run_on_processes(on_two, 2, timeout=300)
    for case, (name, message, seconds) in bad.items():
        assert name != "nothing" and (name, message) == also_bad[case][:2], case
        assert seconds < PATIENCE, case
    for found in (apart, also_apart):
        assert {name for name, _, _ in found.values()} == {"ProgramMismatchError"}
    assert "gpipe: 2 stages on 2 ranks" in apart["schedules"][1]
    assert failed[:2] == ("RuntimeError", "no memory for the kernel of stage 1")
    assert waiting[0] == "CollectiveError" and "rank 0 (pipe=0)" in waiting[1], waiting
    assert "receive 1I0 from rank 1 (pipe=1)" in waiting[1], waiting
    assert waiting[2] < PATIENCE + 5
