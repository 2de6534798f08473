"""Where tests have tensors that start processes: in main memory, or with `pytest --device cuda` on GPUs.

There they are the same tests with torch's default device set, here and on every rank. The ranks use nccl if each has a
GPU, as a single rank has, and else gloo over CUDA tensors, which may share one. Simulated ranks are on CUDA too, so
that both sides of a comparison have the same kernels.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

__all__ = ["backend_of_ranks", "choose_cuda", "starts_processes", "use_device"]

_VARIABLE = "FUNCTIONAL_PARALLEL_TESTS_DEVICE"  # which the ranks' processes inherit


def choose_cuda() -> None:
    """Let this process and the ranks that it starts have their tensors on CUDA, if there is a device."""
    if torch.cuda.is_available():
        os.environ[_VARIABLE] = "cuda"
        use_device(0)


def use_device(rank: int) -> None:
    """Set the default device of this process as chosen."""
    if os.environ.get(_VARIABLE) == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
        torch.Generator = _GeneratorOnCuda  # type: ignore[misc]


def backend_of_ranks(world_size: int) -> str:
    on_cuda = os.environ.get(_VARIABLE) == "cuda"
    return "nccl" if on_cuda and torch.cuda.device_count() >= world_size else "gloo"


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test is in a module that starts processes, other than by mpirun, whose tensors are in main memory."""
    names: dict[str, Any] = vars(getattr(item, "module", None) or object)
    return "run_on_processes" in names and "mpi4py" not in item.nodeid


class _GeneratorOnCuda(torch.Generator):
    """torch's generators are on the CPU by default, whatever the default device is."""

    def __new__(cls, device: Any = "cuda") -> _GeneratorOnCuda:
        return super().__new__(cls, device)
