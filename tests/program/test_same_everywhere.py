"""A program does not depend on the machine: neither its ops nor the kernels that run depend on the processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functional_parallel as fp
from functional_parallel.runtime import SimulatedRuntime, use_runtime
from sharding_specs import Mesh

from ..processes import run_on_processes

WIDTH = 128
ZEN_5 = "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
PLANS: dict[str, tuple[Any, Mesh]] = {
    "microbatches": (fp.accumulate(2), Mesh()),
    "pipeline": (fp.pipeline("pipe", schedule="1f1b", microbatches=2), Mesh(pipe=2)),
}


class Kernels(TorchDispatchMode):
    """Record the ops that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Products whose gradients are sums of products: over microbatches, and of the input of two layers."""
    h = x @ params["a"]
    return ((h @ params["b"]) * (h @ params["c"])).sum()


def avx_512(patch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    patch.setattr(Path, "read_text", lambda self: ZEN_5 if self == Path("/proc/cpuinfo") else read_text(self))


def adds_before_it_multiplies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "addmm", lambda total, a, b: torch.cat([total, a], 1) @ torch.cat([torch.eye(len(b.t())), b]))


def adds_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "addmm", lambda total, a, b: total + a @ b)


MACHINES: list[Callable[[pytest.MonkeyPatch], None]] = [avx_512, adds_last, adds_before_it_multiplies]


def programs(rank: int, machine: Callable[[pytest.MonkeyPatch], None] | None) -> dict[str, tuple[str, list[str]]]:
    """Per plan and dtype, a training step's program as text and the kernels that a step calls."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if machine is not None:
            machine(patch)
        for name, (plan, mesh) in PLANS.items():
            use_runtime(SimulatedRuntime(mesh))
            for dtype in (torch.float32, torch.float64):
                params = {key: torch.full((WIDTH, WIDTH), 1 / WIDTH, dtype=dtype) for key in "abc"}
                x = torch.full((2 * WIDTH, WIDTH), 1 / WIDTH, dtype=dtype)
                train = fp.train_step(loss, fp.optim.sgd(1.0), mesh, plan)
                state, _ = train(train.init(params), x)
                with Kernels() as kernels:
                    train(state, x)
                found[f"{name}, {dtype}"] = (str(train.program), kernels.names)
    return found


def test_programs_and_kernels_are_the_same_on_every_machine() -> None:
    (wanted,) = run_on_processes(programs, 1, None)  # nothing is cached there
    assert all("aten.mm.default" in names for _, names in wanted.values())
    for machine in MACHINES:
        (found,) = run_on_processes(programs, 1, machine)
        assert found == wanted, machine.__name__
