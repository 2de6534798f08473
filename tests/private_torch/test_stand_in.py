"""The private torch APIs in `functional_parallel/_torch/stand_in.py` do what the library relies on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_parallel import _torch

missing = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_devices_of_this_machine_stand_for_themselves() -> None:
    assert not _torch.is_missing("cpu") and not _torch.is_missing("meta")
    cpu = torch.device("cpu")
    assert _torch.device_for_trace(cpu) == _torch.wished_device(cpu) == cpu


@missing
def test_the_stand_in_shows_the_wished_device() -> None:
    assert _torch.is_missing("cuda")
    first, second = (_torch.device_for_trace(torch.device("cuda", index)) for index in range(2))
    assert first.type == second.type != "cuda" and first != second
    assert [_torch.wished_device(each) for each in (first, second)] == [torch.device("cuda", n) for n in range(2)]
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(2, 3, device="cuda")
        made = [torch.zeros(2, device=x.device), torch.ones_like(x), x.new_empty(4), x.cpu(), torch.zeros(1).to(x)]
    assert isinstance(x, _torch.FakeTensor) and x.is_cuda and x.device == torch.device("cuda", 0)
    assert [each.device.type for each in made] == ["cuda", "cuda", "cuda", "cpu", "cuda"]
    assert not x.is_meta and torch.empty(1, device="meta").is_meta
    with mode:
        assert torch.empty(1, device="meta").is_meta


@missing
@pytest.mark.parametrize("gradient", [torch.func.grad, torch.func.jacrev])
def test_gradients_on_the_stand_in(gradient: Callable[..., Any]) -> None:
    """On a fake CUDA tensor, the second of these ends the process. The first backward does not matter."""
    (torch.ones(2, requires_grad=True, device="cpu") * 2).sum().backward()
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device="cuda")
        assert gradient(lambda x: (x * x).sum())(x).device.type == "cuda"
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((leaf.exp() + torch.ones((), device="cpu")).sum(), leaf)
        assert found.device == torch.device("cuda", 0)


def _looks(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj()


def test_results_are_found_by_all_that_they_depend_on() -> None:
    """Operands that differ in one property, in one mode with torch's cache of results: each result is its own."""
    made: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(4, 6),
        lambda: torch.empty(6, 4).t(),
        lambda: torch.empty(4, 12)[:, 6:],
        lambda: torch.empty(4, 6, dtype=torch.float64),
        lambda: torch.empty(4, 6, dtype=torch.int64),
        lambda: torch.empty(4, 6, dtype=torch.complex64),
        lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
        lambda: torch.empty(4, 6, device="cuda" if torch.cuda.is_available() else "meta"),
        lambda: torch.empty(4, 6).requires_grad_(),
    ]
    ops: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x + 1,
        lambda x: x + 1.5,
        lambda x: x * True,
        lambda x: x[1:],
        lambda x: torch.cat([x, x]),
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [0]),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [1]),
    ]
    for cached, mode in zip((True, False), (_torch.FakeTensorMode(), _torch.FakeTensorMode()), strict=True):
        mode.cache_enabled = cached
        with mode:
            found = [[_looks(op(make())) for make in made] for op in ops for _ in range(2)]
        if cached:
            own = found
    assert own == found


@missing
def test_two_devices_are_refused() -> None:
    with _torch.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device="cuda") + torch.ones(3, device="cpu")


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_kernels_trace_with_gradients(kernel: str) -> None:
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3))
        options = {} if kernel == "flash" else {"attn_bias": None, "compute_log_sumexp": True}
        out = op(q, k, v, is_causal=True, scale=0.1, **options)[0]
        assert out.shape == q.shape and out.dtype == q.dtype
        found = torch.autograd.grad(out.sum(), (q, k, v))
    assert [(x.shape, x.device.type) for x in found] == [(q.shape, "cuda")] * 3


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_the_first_fake_mode_keeps_no_tensor_of_its_callers() -> None:
    """torch's first mode imports modules, which keeps the frames of all callers until Python's collector runs."""
    assert "alive 0" in run(
        "import gc, torch, functional_parallel as fp\n"
        "from functional_parallel._torch import StorageWeakRef\n"
        "from sharding_specs import Mesh\n"
        "w = torch.zeros(600, 600); held = StorageWeakRef(w.untyped_storage()); gc.collect(); gc.disable()\n"
        "train = fp.train_step(lambda w, x: (x @ w).sum(), fp.optim.adamw(0.1), Mesh(data=1), fp.zero(0, 'data'))\n"
        "state = train.init(w); del w\n"
        "print('alive', int(not held.expired()))"
    )


@missing
def test_fake_tensors_on_other_devices_stay_as_they_are() -> None:
    """torch's initialisers skip tensors by `is_meta`, which is true of a fake tensor on the CPU."""
    there = _torch.device_for_trace("cuda")
    with _torch.FakeTensorMode():
        for x in (torch.empty(2), torch.empty(2, device="meta")):
            assert x.is_meta == torch.Tensor.is_meta.__get__(x)
        assert not torch.empty(2, device=there).is_meta
