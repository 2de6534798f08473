"""The shared memory that `memory()` lists is what processes map, and the peak of tensors holds there within a tenth."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from functional_parallel.shared_memory.mapped_memory import MappedMemory
from functional_parallel.shared_memory.slots import AT_ONCE, HALF, SMALL_HALF, slot_bytes
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh, P

from ..processes import run_on_processes

PAGES = 64 << 10  # of the ends of what was taken, and of what signals and channels take
MOST = {64: 1.2, 4096: 1.03}  # of what is predicted; where tensors are small, results under way are a large part
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (fp.tensor_parallel("tensor", {"*in": P(None, "tensor"), "*out": P("tensor")}), Mesh(tensor=2)),
    "pipeline": (fp.pipeline("pipe", schedule="1f1b", microbatches=4), Mesh(pipe=2)),
}


def loss(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = torch.tanh(x @ layer["in"]) @ layer["out"]
    return x.square().mean()


def mapped() -> int:
    """The bytes of shared memory that this process has pages of."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))


def pieces() -> list[torch.Tensor]:
    """What is mapped, as tensors. They are no tensors of the program."""
    found = [each for each in gc.get_objects() if isinstance(each, MappedMemory)]
    return [tensor for piece in found for tensor in (piece.halves, piece.channels[0])]


def step_on_processes(rank: int, name: str, width: int, algorithm: str) -> tuple[int, int, int, int]:
    """Return predicted and mapped bytes of shared memory, and predicted and measured bytes of tensors."""
    torch.manual_seed(0)
    plan, mesh = PLANS[name]
    before = mapped()
    use_runtime(ProcessRuntime(mesh, algorithm=algorithm))
    params = [{"in": torch.randn(32, width) / 8, "out": torch.randn(width, 32) / 8} for _ in range(4)]
    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan)
    x = torch.randn(64, 32)
    state, _ = train(train.init(params), x)
    state, _ = train(state, x)
    found = train.program.memory()
    memory = found.ranks[rank] if name == "pipeline" else found
    shared = mapped() - before
    peaks = []
    for _ in range(3):  # the least counts: a thread of the backend may hold a gathered tensor after its last use
        held = [h.parts.values() if name == "pipeline" else [h] for h in state.handles]
        handles = [part for parts in held for part in parts]
        del held
        with torch.no_grad(), tracked([handles, pieces()]) as tracker:
            del handles
            state, _ = train(state, x)
        peaks.append(tracker.peak)
    beside = sum(piece.untyped_storage().nbytes() for piece in pieces())
    return memory.shared, shared, memory.peak, min(peaks) - beside


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is shared")
@pytest.mark.parametrize("width", sorted(MOST))
@pytest.mark.parametrize("name", sorted(PLANS))
def test_processes_map_what_is_listed(name: str, width: int) -> None:
    """A rank maps its own piece and the other's.

    What several tensors are packed into lies in shared memory, so ZeRO holds up to a quarter less of tensors.
    """
    found = run_on_processes(step_on_processes, 2, name, width, "shared")
    listed = sum(predicted for predicted, *_ in found)
    for _, shared, predicted, measured in found:
        assert listed - PAGES <= shared <= listed + PAGES, (listed, shared)
        assert 0.75 * predicted < measured < MOST[width] * predicted, (predicted, measured)


@pytest.mark.parametrize("name", ["data", "zero 3", "pipeline"])
def test_the_backend_maps_nothing(name: str) -> None:
    width = 4096
    for _, shared, predicted, measured in run_on_processes(step_on_processes, 2, name, width, "backend"):
        assert shared <= PAGES
        assert 0.75 * predicted < measured < MOST[width] * predicted, (predicted, measured)


@given(count=st.integers(1, 63), length=st.integers(0, 1 << 24), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_a_slot_fits_into_a_half(count: int, length: int, itemsize: int) -> None:
    assert slot_bytes(count, length, itemsize) <= HALF
    assert slot_bytes(count, length, itemsize) >= min(count * length * itemsize, SMALL_HALF)


def test_the_largest_collective_that_is_sent_at_once_has_a_slot_of_its_size() -> None:
    """Pieces of three tensors would use more, since their slot has room for four pieces of each."""
    assert slot_bytes(3, AT_ONCE // 3, 1) == AT_ONCE


def test_what_is_listed() -> None:
    """Half of a megabyte for few bytes; nothing for one rank; a line of the table."""
    step = fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).sum()), Mesh(data=2))
    memory = step.lower(torch.ones(3), torch.ones(4, 3)).memory()
    assert memory.shared == memory.to_dict()["shared"] == 2 * SMALL_HALF
    assert "and at most 512.0 KiB of shared memory, if the ranks are processes with gloo" in str(memory)
    alone = fp.compile(lambda w, x: (x @ w).sum(), Mesh(), in_specs=(P(), P()), out_specs=P())
    memory = alone.lower(torch.ones(3), torch.ones(4, 3)).memory()
    assert memory.shared == 0 and "gloo" not in str(memory)
