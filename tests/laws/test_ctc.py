"""Speech models' loss: torch's own, on a batch that stays split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

RULES = {"hidden": P(None, "tensor"), "classes": P("tensor")}
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data", strict=True), Mesh(data=2)),
    "microbatches": (fp.chain(fp.zero(3, "data", strict=True), fp.accumulate(3)), Mesh(data=2)),
    "tensor": (fp.chain(fp.tensor_parallel("tensor", RULES, strict=True), fp.zero(1, "data")), Mesh(data=2, tensor=2)),
    "pipeline": (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
}


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (4, 8), "classes": (8, 5)}
    return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last sample is too short for its target, so that its loss is infinite."""
    generator = torch.Generator().manual_seed(1)
    x, targets = torch.randn(8, 9, 4, generator=generator).double(), torch.randint(1, 5, (8, 3), generator=generator)
    return x, targets, torch.tensor([9, 7, 8, 9, 6, 9, 7, 2]), torch.tensor([3, 1, 2, 3, 2, 0, 3, 3])


def scores(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["hidden"]) @ params["classes"]).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_torchs(plan: str, reduction: str) -> None:
    def loss(params: Any, x: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
        found = F.ctc_loss(scores(params, x), targets, inputs, lengths, reduction=reduction, zero_infinity=True)
        return found.square().sum() if reduction == "none" else found

    fp.testing.assert_equivalent(loss, *PLANS[plan], params(), *batch(), rtol=1e-12)


@pytest.mark.parametrize("plan", [None, "data"])
def test_lengths_that_python_counts_and_one_sample(plan: str | None) -> None:
    def loss(params: Any, x: Tensor, targets: Tensor) -> Tensor:
        each = scores(params, x)
        several = F.ctc_loss(each, targets, [9, 7, 8, 9, 6, 9, 7, 9], (3, 1, 2, 3, 2, 0, 3, 3), blank=0)
        return several + F.ctc_loss(each[:, 0], targets[0], torch.tensor(9), torch.tensor(3), reduction="sum")

    x, targets, *_ = batch()
    transform, mesh = PLANS[plan] if plan else (fp.accumulate(1), Mesh(data=1))
    found, value = fp.compile(fp.grad_and_value(transform(loss)), mesh)(params(), x, targets)
    whole = {name: p.requires_grad_() for name, p in params().items()}  # torch.func cannot take lengths of Python
    wanted = loss(whole, x, targets)
    wanted.backward()
    slopes = {name: p.grad for name, p in whole.items()}
    torch.testing.assert_close((value, found), (wanted.detach(), slopes), rtol=1e-12, atol=1e-12)


def test_targets_end_to_end_are_refused() -> None:
    x, targets, *lengths = batch()

    def loss(params: Any, x: Tensor) -> Tensor:
        return F.ctc_loss(scores(params, x), targets.flatten(), *lengths)

    step = fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))
    with pytest.raises(TracingError, match=r"row per sample.*got \(24,\).*pad_sequence"):
        step(params(), x)


def test_a_second_derivative_is_refused() -> None:
    def loss(params: Any, *batch: Tensor) -> Tensor:
        return F.ctc_loss(scores(params, batch[0]), *batch[1:], zero_infinity=True)

    def sharp(params: Any, *batch: Tensor) -> Tensor:
        slopes = torch.func.grad(loss)(params, *batch)
        return loss({name: p + 0.1 * slopes[name].detach() for name, p in params.items()}, *batch)

    def penalised(params: Any, *batch: Tensor) -> Tensor:
        return sum(slope.square().sum() for slope in torch.func.grad(loss)(params, *batch).values())  # type: ignore[return-value]

    fp.testing.assert_equivalent(sharp, *PLANS["data"], params(), *batch(), rtol=1e-12)
    with pytest.raises(TracingError, match="no second"):
        fp.compile(fp.grad(fp.data_parallel("data")(penalised)), Mesh(data=2))(params(), *batch())
