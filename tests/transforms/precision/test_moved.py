"""A bfloat16 step moves no more bytes than torch's under autocast, and norms are not cast where kernels are wide."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.passes import cheap
from functional_parallel.transforms.precision import mode
from sharding_specs import Mesh

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from model import Config
from moved import of_ours, under_autocast


@pytest.fixture
def another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions as for a device other than the CPU."""
    for module in (mode, cheap):
        monkeypatch.setattr(module, "in_main_memory", lambda x: False)


CONFIG = Config("test", 2, 64, heads=2, time=64, batch=4, vocab=512)


def test_no_more_bytes_than_under_autocast(request: pytest.FixtureRequest) -> None:
    kernels, theirs = under_autocast(CONFIG)
    on_cpu = of_ours(CONFIG)
    request.getfixturevalue("another_device")
    elsewhere = of_ours(CONFIG)
    print({"autocast": theirs.total(), "ours": on_cpu[1].total(), "ours on another device": elsewhere[1].total()})
    assert elsewhere[1].total() < on_cpu[1].total() <= theirs.total()
    assert elsewhere[0].total() <= kernels.total()
    assert elsewhere[0]["_to_copy"] < kernels["_to_copy"], "casts are not more than autocast's"


NARROW = {
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w),
    "softmax": lambda x, w: torch.softmax(x * w, -1),
    "log_softmax": lambda x, w: F.log_softmax(x * w, -1),
}


def casts(name: str, **options: Any) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Number of casts in the forward and backward of a loss; the loss; the gradients."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": 1 + torch.rand(32, generator=generator) / 4}
    x = torch.randn(16, 32, generator=generator)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = NARROW[name](x, params["w"])
        return (y * x).sum()

    step = fp.compile(fp.grad_and_value(fp.mixed_precision("bf16", **options)(loss)), Mesh())
    gradients, value = step(params, x)
    counts = Counter(str(node.target) for node in step.program.traced.nodes)
    return counts["aten._to_copy.default"], value, gradients


@pytest.mark.parametrize("name", NARROW)
def test_wide_kernels_need_no_casts(name: str, request: pytest.FixtureRequest) -> None:
    wide, value, gradients = casts(name)
    request.getfixturevalue("another_device")
    narrow, found, close = casts(name)
    assert narrow < wide or name == "rms_norm"  # on the CPU it consists of ops, with casts of its own
    torch.testing.assert_close(found, value, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(close, gradients, rtol=2e-2, atol=5e-2)
    assert casts(name, islands=[name])[0] == wide, "the user asked for float32"


@pytest.mark.usefixtures("another_device")
def test_kept_weights_of_a_norm_keep_it_wide() -> None:
    for keep, dtype in (([], torch.bfloat16), (["w"], torch.float32)):
        plan = fp.mixed_precision("bf16", keep=keep)
        step = fp.compile(plan(lambda p, x: NARROW["layer_norm"](x, p["w"]).sum()), Mesh())
        program = step.lower({"w": torch.ones(32)}, torch.ones(16, 32))
        (norm,) = (node for node in program.traced.nodes if "native_layer_norm" in str(node.target))
        assert info(norm.args[0]).aval.dtype == dtype
