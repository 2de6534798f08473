"""torch.func's own transforms of a pipelined function give what they give of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from .networks import SYNCHRONOUS, assert_close, made, pipeline


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return (x**2).sum()


def drawn(seed: int, layers: int = 4) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator) / 2

    return [draw(2, 2) for _ in range(layers)], draw(8, 2)


def per_sample(f: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient per group of samples, as many groups as one."""

    def of_groups(params: list[Tensor], x: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(f), (None, 0))(params, torch.stack([x, 2 * x, -x]))

    return of_groups


def directional(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: torch.func.jvp(f, (params, x), (params, x))


OF_TORCH = {
    "grad": torch.func.grad,
    "grad by the batch": lambda f: torch.func.grad(f, argnums=1),
    "per-sample": per_sample,
    "hessian": torch.func.hessian,
    "jvp": directional,
}
PLANS = {
    "pipe": (fp.pipeline("pipe", microbatches=4), Mesh(pipe=2), P()),
    "pipe and data": (
        fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", schedule="zb-h1", microbatches=2)),
        Mesh(pipe=2, data=2),
        P("data"),
    ),
    "accumulated": (fp.accumulate(4), Mesh(data=1), P()),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("transform", OF_TORCH)
def test_of_the_compiled_function(transform: str, plan: str) -> None:
    chain, mesh, _ = PLANS[plan]
    args = drawn(0)
    compiled = fp.compile(chain(loss), mesh)
    assert_close(OF_TORCH[transform](compiled)(*args), OF_TORCH[transform](loss)(*args))


def on_a_process(rank: int, plan: str) -> dict[str, Any]:
    """What messages bring has no derivative: each process runs all stages. Nothing has called the functions before."""
    chain, mesh, _ = PLANS[plan]
    params, x = drawn(0)
    found = {name: transform(fp.compile(chain(loss), mesh))(params, x) for name, transform in OF_TORCH.items()}
    leaves = [weight.clone().requires_grad_() for weight in params]
    fp.compile(chain(loss), mesh)(leaves, x).backward()
    step = fp.train_step(loss, fp.optim.sgd(0.1), mesh, chain)
    state = step.init(params)
    with pytest.raises(PipelineError, match="a step's batch or state takes part in a derivative"):
        torch.func.grad(lambda batch: step(state, batch)[1].loss)(x)
    step(state, x)  # the state is there still
    return found | {"backward": [leaf.grad for leaf in leaves]}


@pytest.mark.parametrize("plan", ["pipe", "pipe and data"])
def test_of_the_compiled_function_on_processes(plan: str) -> None:
    wanted = {name: transform(loss)(*drawn(0)) for name, transform in OF_TORCH.items()}
    wanted["backward"] = wanted["grad"]
    for found in run_on_processes(on_a_process, PLANS[plan][1].size, plan):
        for name in wanted:
            assert_close(found[name], wanted[name])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("transform", ["grad", "hessian", "jvp"])
def test_compiled_of_the_plan(transform: str, plan: str) -> None:
    """The other way round: what is compiled is a derivative of torch.func, which carries no layout."""
    chain, mesh, batch = PLANS[plan]
    args = drawn(1)
    compiled = fp.compile(OF_TORCH[transform](chain(loss)), mesh, in_specs=(P(), batch), out_specs=P())
    assert_close(compiled(*args), OF_TORCH[transform](loss)(*args))


@pytest.mark.parametrize("transform", OF_TORCH)
def test_of_the_plan_itself(transform: str) -> None:
    """`plan(loss)` is a pure function; without a mesh, of one microbatch."""
    args = drawn(2)
    plan = fp.pipeline("pipe", microbatches=4)(loss)
    assert_close(OF_TORCH[transform](plan)(*args), OF_TORCH[transform](loss)(*args))


@settings(max_examples=15)
@given(st.sampled_from(SYNCHRONOUS), st.integers(0, 100))
def test_per_sample_gradients_sum_to_the_scheduled_gradient(name: str, seed: int) -> None:
    schedule = made(name, 2, 4)
    params, x = drawn(seed, layers=max(4, schedule.depth))
    plan = pipeline(schedule)(loss)
    of_each = torch.func.vmap(torch.func.grad(lambda w, row: plan(w, row[None])), (None, 0))(params, x)
    scheduled = fp.compile(fp.grad(plan), Mesh(pipe=2))(params, x)
    assert_close([each.sum(0) for each in of_each], scheduled)


def test_hessian_beside_sharded_optimizer_state() -> None:
    """ZeRO-1 and 2 leave gradients unreduced, and second derivatives with them."""

    def one(w: Tensor, x: Tensor) -> Tensor:
        return loss([w, w], x)

    params, x = drawn(3)
    for stage in (0, 1, 2):
        plan = fp.chain(fp.zero(stage, "data"), fp.pipeline("pipe", microbatches=2))
        found = fp.compile(fp.hessian(plan(one)), Mesh(pipe=2, data=2))(params[0], x)
        assert_close(found, torch.func.hessian(one)(params[0], x))
