"""State on disk: the bits of the run without, exact bytes on disk, and real processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ops import disk_blocks, is_on_disk
from functional_parallel.program import memory_moves
from sharding_specs import Mesh, P

from ..passes.networks import batch, loss, parameters
from ..processes import run_on_processes

X, Y = batch(8)
Plan = list[Any]


def params() -> Any:
    return optree.tree_map(torch.Tensor.float, parameters(3))


def size(tree: Any) -> int:
    return sum(x.numel() for x in optree.tree_leaves(tree))


def on_disk(folder: Path, group: int | str = 300, **options: Any) -> fp.offload:
    return fp.offload(state="disk", path=str(folder), group=group, **options)


def train_on(mesh: Mesh, plan: Plan, optimizer: Any = None, **options: Any) -> Any:
    return fp.train_step(loss, optimizer or fp.optim.adamw(1e-2), mesh, fp.chain(*plan), **options)


def run(train: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = train(state, X.float(), Y)
    return state


def is_same(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def shards(handle: Any) -> list[torch.Tensor]:
    if isinstance(handle, torch.Tensor):
        return [handle]
    parts = handle if isinstance(handle, list) else handle.parts.values()
    return [shard for part in parts for shard in shards(part)]


def bytes_on_disk(state: Any) -> int:
    """Bytes of all simulated ranks on disk."""
    found = [shard for handle in state.handles for shard in shards(handle)]
    return sum(shard.nbytes for shard in found if is_on_disk(shard))


SCALE = fp.LossScale(2.0**9)
PLANS = {
    "data": (Mesh(data=2), [fp.data_parallel("data")], []),
    "zero 1": (Mesh(data=2), [fp.zero(1, "data")], []),
    "zero 2, flat": (Mesh(data=2), [fp.zero(2, "data", layout="flat")], []),
    "zero 3, masters": (Mesh(data=2), [fp.mixed_precision("bf16"), fp.zero(3, "data")], [fp.accumulate(2)]),
    "zero 2, fp16": (Mesh(data=2), [fp.mixed_precision("fp16", loss_scale=SCALE), fp.zero(2, "data")], []),
    "pipeline": (Mesh(pipe=2, data=2), [fp.zero(2, "data")], [fp.pipeline("pipe", microbatches=2)]),
}


@pytest.mark.parametrize("name", PLANS)
def test_state_is_on_disk_between_steps(name: str, tmp_path: Path) -> None:
    mesh, before, after = PLANS[name]
    plain, moved = train_on(mesh, [*before, *after]), train_on(mesh, [*before, on_disk(tmp_path), *after])
    state = run(moved, moved.init(params()), 1)
    held = bytes_on_disk(state)
    assert held
    ran = run(moved, state, 2)
    assert is_same(plain.whole(run(plain, plain.init(params()), 3)), moved.whole(ran))
    assert bytes_on_disk(ran) == held
    assert bytes_on_disk(moved.copy(ran)) == held
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("masters", "each"), [(False, 8), (True, 12)])
def test_bytes_at_rest_and_in_a_step(masters: bool, each: int, tmp_path: Path) -> None:
    """The moments, and the masters, once on disk in total, 12Ψ/N a rank; a step reads and writes them once."""
    plan = [*[fp.mixed_precision("bf16")] * masters, fp.zero(3, "data"), on_disk(tmp_path)]
    train = train_on(Mesh(data=2), plan)
    run(train, train.init(params()), 1)
    rank = each * size(params()) // 2
    assert train.program.memory().peaks["disk"] == rank
    moved = train.program.bytes_moved()
    assert moved["disk", "host"] == moved["host", "disk"] == rank


def test_small_groups_need_less_of_the_host(tmp_path: Path) -> None:
    def peak(group: int | str) -> int:
        train = train_on(Mesh(data=2), [fp.mixed_precision("bf16"), fp.zero(3, "data"), on_disk(tmp_path, group)])
        return int(train.lower(params(), X.float(), Y).memory().peaks["host"])

    state, largest = 12 * size(params()) // 2, 12 * 128 // 2
    gradients = 4 * size(params()) // 2
    assert peak(1) <= gradients + 3 * largest + 64 < peak("1MiB") and peak("1MiB") >= state


@settings(max_examples=8, deadline=None)
@given(
    group=st.integers(1, 4000),
    stage=st.integers(0, 3),
    clip=st.sampled_from([None, 0.5]),
    name=st.sampled_from("ab"),
    memory=st.sampled_from(["host", "disk"]),
)
def test_any_group(group: int, stage: int, clip: float | None, name: str, memory: str, tmp_path_factory: Any) -> None:
    optimizer = {
        "a": fp.optim.lamb(1e-2),
        "b": fp.optim.by_path({"head": fp.optim.sgd(0.1, momentum=0.9), "*": fp.optim.adamw(0.1)}),
    }[name]
    before, folder = [fp.zero(stage, "data")], tmp_path_factory.mktemp("disk")
    plain = train_on(Mesh(data=2), before, optimizer, clip=clip)
    offload = fp.offload(state=memory, path=str(folder), group=group)
    moved = train_on(Mesh(data=2), [*before, offload], optimizer, clip=clip)
    a, b = run(plain, plain.init(params()), 2), run(moved, moved.init(params()), 2)
    assert is_same(plain.whole(a), moved.whole(b))
    assert plain.program.counts() == moved.program.counts()


@pytest.mark.parametrize("there", ["device", "host", "disk"])
def test_a_run_goes_on_from_any_memory_in_any(there: str, tmp_path: Path) -> None:
    def train(memory: str) -> Any:
        path = {"path": str(tmp_path)} if memory == "disk" else {}
        return train_on(
            Mesh(data=2), [fp.zero(2, "data"), *([fp.offload(state=memory, **path)] if memory != "device" else [])]
        )

    whole = train("device")
    wanted = whole.whole(run(whole, whole.init(params()), 4))
    for after in ("device", "host", "disk"):
        first, then = train(there), train(after)
        saved = tmp_path / f"checkpoint {after}"
        first.save(run(first, first.init(params()), 2), saved)
        assert is_same(then.whole(run(then, then.restore(saved), 2)), wanted)


# --- on processes ---


def _trained(rank: int, folder: Path, fault: str) -> Any:
    memory_moves.LEAST = 0  # every move is in flight
    train = train_on(Mesh(data=2), [fp.zero(2, "data"), on_disk(folder)])
    state = run(train, train.init(params()), 1)
    if fault == "slow":
        read = os.preadv
        os.preadv = lambda *given: time.sleep(0.01) or read(*given)  # type: ignore[assignment]
    return optree.tree_map(torch.clone, train.params(run(train, state, 2)))


@pytest.mark.parametrize("fault", ["", "slow"])
def test_processes_have_the_same_bits(fault: str, tmp_path: Path) -> None:
    plain = train_on(Mesh(data=2), [fp.zero(2, "data")], reduction="ordered")
    wanted = plain.params(run(plain, plain.init(params()), 3))
    for found in run_on_processes(_trained, 2, tmp_path, fault):
        assert is_same(found, wanted)


# --- under a limit of memory ---


def _under_a_limit(where: str, limit: int) -> Any:
    """The result of a child that may use so many bytes, or its error. Freed buffers go back to the system at once."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.trained_under_a_budget", where, str(limit)]
    result = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=200)
    return json.loads(result.stdout) if result.stdout else result.stderr


@pytest.mark.slow
def test_states_that_exceed_the_memory_eight_times() -> None:
    """In a process that has half of the memory of its states, kernels and all, where the run without dies."""
    found, wanted = _under_a_limit("disk", 0), _under_a_limit("device", 1 << 32)
    assert found["losses"] == wanted["losses"]
    assert (
        found["states"] > 8 * (found["peaks"]["device"] + found["peaks"]["host"])
        and found["limit"] < found["states"] / 2
    )
    assert "memory" in _under_a_limit("device", found["limit"])


# --- refused ---


def test_a_folder_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload\(state='disk'\): give a folder on the disk"):
        fp.offload(state="disk")
    with pytest.raises(fp.errors.DiskError, match=r"gone: no block can be made in this folder"):
        on_disk(tmp_path / "gone")


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = train_on(Mesh(data=2), [fp.zero(2, "data"), on_disk(tmp_path)])

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(fp.errors.DiskError, match=r"no block of .* can be made"):
        train.init(params())
    assert disk_blocks._BLOCKS == {} or not list(tmp_path.iterdir())


def test_ops_do_not_read_a_disk(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return fp.to_memory(x, fp.disk(tmp_path)) + 1

    with pytest.raises(fp.errors.MemoriesError, match=r"test_state_on_disk.py.*on disk. Read it first"):
        fp.compile(f, Mesh(), in_specs=P(), out_specs=P())(torch.ones(2))


@pytest.mark.parametrize("view", [torch.t, lambda x: x[:, 1:], lambda x: x[0].expand(3, 4), lambda x: x[1:]])
def test_views_of_values_on_disk(view: Any, tmp_path: Path) -> None:
    f = fp.compile(
        lambda x: fp.to_memory(view(fp.to_memory(x, fp.disk(tmp_path))), "device") * 1,
        Mesh(),
        in_specs=P(),
        out_specs=P(),
    )
    x = torch.randn(3, 4)
    assert torch.equal(f(x), view(x))


def test_two_reads_of_a_value_on_disk_have_a_gradient(tmp_path: Path) -> None:
    def f(w: torch.Tensor) -> torch.Tensor:
        kept = fp.to_memory(w, fp.disk(tmp_path))
        return (fp.to_memory(kept, "device") * fp.to_memory(kept, "device")).sum()

    f = fp.compile(torch.func.grad(f), Mesh(), in_specs=P(), out_specs=P())
    assert torch.equal(f(torch.arange(3.0)), 2 * torch.arange(3.0))


def test_a_process_that_may_not_open_more_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(fp.DiskError, match=r"may not open more files .* `ulimit -n 65536`"):
        disk_blocks.empty_on_disk([4], torch.float32, str(tmp_path))
