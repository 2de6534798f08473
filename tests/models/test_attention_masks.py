"""Models that read their attention mask unless they know that they are traced, without a plan and under one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

from .test_hugging_face import MODELS, Batch, loss_of

transformers = pytest.importorskip("transformers")

PLANS: dict[str, tuple[Any, Mesh]] = {
    "no plan": (None, Mesh()),
    "one rank": (None, Mesh(data=1)),
    "remat": (fp.remat("layers"), Mesh()),
    "data": (fp.data_parallel("data"), Mesh(data=2)),
}


def masked(name: str, double: bool = True) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name][0]()
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return *loss_of(model.double().train(), double), {**batch, "attention_mask": mask}


@pytest.mark.parametrize(("name", "plan"), [("llama", "no plan"), *(("bert", plan) for plan in PLANS)])
def test_a_step_with_an_attention_mask_is_the_same_with_and_without_a_plan(name: str, plan: str) -> None:
    loss, params, batch = masked(name)
    gradients, want = fp.grad_and_value(loss)(params, batch)
    train = fp.train_step(loss, fp.optim.sgd(1.0), PLANS[plan][1], PLANS[plan][0])
    state, metrics = train(train.init(params), batch)
    assert abs(metrics.loss - want) < 1e-12 * abs(want)
    for path, after in train.params(state).items():
        torch.testing.assert_close(after, params[path] - gradients[path], rtol=1e-11, atol=1e-11)


def masked_sum(w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (w * mask[:, :2].bool()).pow(2).sum()


def reads_unless_traced(w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same function, which skips the mask if it can read that it is true everywhere."""
    seen = mask[:, :2].bool()
    if not isinstance(seen, FakeTensor) and bool(seen.all()):
        return (w * w).sum()
    return masked_sum(w, mask)


W, MASK = torch.arange(6.0).reshape(3, 2), torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: fp.grad(f),
        lambda f: fp.hessian(f),
        lambda f: lambda w, mask: fp.jvp(lambda w: f(w, mask), (w,), (w + 1,)),
        lambda f: lambda w, mask: fp.jvp(lambda w: fp.grad(f)(w, mask), (w,), (w + 1,)),
        lambda f: lambda w, mask: fp.vmap(f)(torch.stack([w, w + 1]), torch.stack([mask, 1 - mask])),
        lambda f: lambda w, mask: fp.vmap(fp.grad(f), in_dims=(0, None))(torch.stack([w, w + 1]), mask),
        lambda f: lambda w, mask: fp.grad(lambda w: fp.vmap(lambda m: f(w[:1], m))(mask[:, None]).sum())(w),
    ],
    ids=["grad", "hessian", "jvp", "jvp of grad", "vmap", "vmap of grad", "grad of vmap"],
)
def test_a_function_can_detect_the_trace_under_every_transform(derivative: Callable[..., Any]) -> None:
    compiled = fp.compile(derivative(reads_unless_traced), Mesh(), in_specs=(P(), P()), out_specs=P())
    torch.testing.assert_close(compiled(W, MASK), derivative(masked_sum)(W, MASK))


def test_a_mask_that_is_read_under_torchs_own_gradient_is_refused_with_the_way_out() -> None:
    loss, params, batch = masked("bert")
    step = fp.compile(torch.func.grad(loss), Mesh(), in_specs=(P(), P()), out_specs=P())
    with pytest.raises(TracingError, match=r"attention mask.*hides the trace; use fp\.grad"):
        step(params, batch)
