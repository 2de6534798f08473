"""A loss may take derivatives itself, of sums over the samples that ranks share: penalties, steps within steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cubes(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x @ w) ** 3).sum()


def penalty(grad: Any) -> Loss:
    return lambda w, x: (grad(lambda x: cubes(w, x))(x) ** 2).sum()


def inner_step(grad: Any) -> Loss:
    return lambda w, x: cubes(w - grad(lambda w: ((x @ w) ** 2).sum())(w), x)


def _pulled_back(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, pull = torch.func.vjp(lambda x: (x @ w) ** 2, x)
    return (pull(torch.ones_like(y))[0] ** 2).sum()


def _pushed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda w: cubes(w, x), (w,), (torch.ones_like(w),))[1]


DERIVATIVES: dict[str, Loss] = {
    "penalty": penalty(torch.func.grad),
    "penalty, fp.grad": penalty(fp.grad),
    "inner step": inner_step(torch.func.grad),
    "inner step, fp.grad": inner_step(fp.grad),
    "vjp": _pulled_back,
    "jvp": _pushed,
    "twice": lambda w, x: (torch.func.grad(lambda w: penalty(torch.func.grad)(w, x))(w)).sum(),
}

#: of partial sums: only their shape is asked for
LIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_like": lambda s: torch.maximum(s, torch.zeros_like(s)),
    "ones_like": lambda s: s * torch.ones_like(s),
    "full_like": lambda s: s + torch.full_like(s, 3.0),
    "empty_like": lambda s: s + torch.empty_like(s).fill_(2.0),
    "new_full": lambda s: s * s.new_full(s.shape, 2.0),
    "another dtype": lambda s: s + torch.ones_like(s, dtype=torch.int64),
}

LOSSES: dict[str, Loss] = {
    **DERIVATIVES,
    **{f"{name}, of a sum": lambda w, x, like=like: like((x @ w).sum()) for name, like in LIKE.items()},
    **{f"{name}, of rows": lambda w, x, like=like: like((x @ w).sum(0)).square().sum() for name, like in LIKE.items()},
}


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    ranks=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]),
    spec=st.sampled_from([P(), P("tensor"), P(None, "tensor"), P(None, (2, "tensor"))]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(
    name: str, ranks: tuple[int, int], spec: P, stage: int, microbatches: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w, x = (torch.randint(-2, 3, shape, generator=generator).double() for shape in ((4, 4), (16, 4)))
    plan = fp.chain(fp.tensor_parallel("tensor", spec), fp.zero(stage, "data"))
    plan = plan if microbatches is None else fp.chain(plan, fp.accumulate(microbatches))
    fp.testing.assert_equivalent(LOSSES[name], plan, Mesh(data=ranks[0], tensor=ranks[1]), w, x, exact=True)


@pytest.mark.parametrize("spec", [P(), P("tensor"), P(None, "tensor")])
def test_autograds_own_gradient(spec: P) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return (torch.autograd.grad(cubes(w, x), x, create_graph=True)[0] ** 2).sum()

    w, x = torch.arange(16.0).reshape(4, 4).double() % 5 - 2, torch.arange(32.0).reshape(8, 4).double() % 3 - 1
    plan = fp.chain(fp.tensor_parallel("tensor", spec), fp.data_parallel("data"))
    found, value = fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2, tensor=2))(w, x)
    whole = w.clone().requires_grad_()
    wanted = loss(whole, x)
    wanted.backward()
    assert value == wanted and torch.equal(found, whole.grad)


@pytest.mark.parametrize("spec", [P(), P("tensor"), P(None, "tensor")])
def test_a_loss_that_makes_zeros_like_a_sum(spec: P) -> None:
    """torch's cosine embedding loss does."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cosine_embedding_loss(x @ w, x.exp() @ w, torch.ones(8) * (-1) ** torch.arange(8))

    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (8, 4)))
    plan = fp.chain(fp.tensor_parallel("tensor", spec), fp.data_parallel("data"))
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2, tensor=2), w, x, rtol=1e-12)


# -----------------------------------------------------------------------------
# Of what torch has fused backward ops for
# -----------------------------------------------------------------------------

FUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:, 1:5:2],
    "select": lambda x: x[:, 1],
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (6,), x[0].detach().cos(), eps=0.1),
    "group_norm": lambda x: F.group_norm(x.view(8, 6, 1), 2, eps=0.1),
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "glu": F.glu,
    "prelu": lambda x: F.prelu(x, torch.full((6,), 0.3, dtype=x.dtype)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(8) % 6, ignore_index=2, label_smoothing=0.1),
    "cross_entropy of pixels": lambda x: F.cross_entropy(x.view(8, 3, 1, 2), torch.arange(16).view(8, 1, 2) % 3),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(1).sin()),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(1).sin()),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(1).sin()),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(1).sigmoid().detach()),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_derivatives_of_fused_ops(name: str, stage: int) -> None:
    """Nothing is computed whole for want of a rule, which would be a warning, and its own derivative is torch's."""
    op = FUSED[name]

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inner = lambda w, x: op(x * w).sin().sum()  # noqa: E731
        adapted = w - 0.1 * torch.func.grad(inner)(w, x)
        return (torch.func.grad(inner, 1)(adapted, x) ** 2).sum() + inner(adapted, x)

    w, x = (torch.linspace(-2, 3, 6 * rows, dtype=torch.float64).view(rows, 6).cos().squeeze(0) for rows in (1, 8))
    fp.testing.assert_equivalent(loss, fp.zero(stage, "data"), Mesh(data=2), w, x, rtol=1e-10)


PLANS = {
    **{f"zero {stage}": fp.zero(stage, "data") for stage in (0, 1, 3)},
    "accumulated": fp.chain(fp.zero(2, "data"), fp.accumulate(2)),
    "unequal microbatches": fp.chain(fp.data_parallel("data"), fp.accumulate(3)),
    "channels": fp.tensor_parallel("data", {"w": P("data"), "b": P("data")}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by", ["images", "weights", "both"])
@pytest.mark.every(2)
def test_penalties_on_a_convolution(by: str, plan: str) -> None:
    """One on the gradient by images alone asks it for nothing else."""
    numbers = {"images": 1, "weights": 0, "both": (0, 1)}[by]

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        inner = torch.func.grad(lambda p, x: F.conv2d(x, p["w"], p["b"], stride=2).square().sum(), numbers)
        return sum((leaf - 1).square().sum() for leaf in optree.tree_leaves(inner(p, x)))

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).double()  # noqa: E731
    params, x = {"w": draw(4, 2, 2, 2), "b": draw(4)}, draw(8, 2, 4, 4)
    step = fp.testing.assert_equivalent(loss, PLANS[plan], Mesh(data=2), params, x, exact=True)
    if plan == "zero 0" and by == "images":
        assert step.program.counts() == {("psum", ("data",)): 3}, "the loss and two gradients"


# -----------------------------------------------------------------------------
# Per sample, forward over reverse: tangents that torch knows to be zero, in two vmaps
# -----------------------------------------------------------------------------

SECOND: dict[str, Loss] = {
    "tanh": lambda w, x: torch.tanh(x * w).sum(),
    "powers": lambda w, x: ((x * w) ** 3).sum(),
    "views": lambda w, x: (torch.sigmoid(x.view(2, 2) @ w.view(2, 2)).T.reshape(4)[1:] * x[1:]).sum(),
    "quotients": lambda w, x: (x / (2 + w.square()) - 3 * x.square()).sum(),
    "one layer": lambda w, x: torch.tanh(x @ w.outer(w)).square().mean(),
}


@pytest.mark.parametrize("name", SECOND)
def test_hessians_per_sample(name: str) -> None:
    loss = SECOND[name]
    w, x = (torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4).squeeze(0) for rows in (1, 6))
    wanted = torch.func.vmap(torch.func.hessian(loss), (None, 0))(w, x)
    each = torch.func.vmap(torch.func.hessian(loss), (None, 0))
    found = [
        fp.compile(fp.data_parallel("data")(each), Mesh(data=2))(w, x),
        fp.compile(fp.vmap(fp.hessian(loss), (None, 0), spmd_axis="data"), Mesh(data=2))(w, x),
    ]
    for result in found:
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.every(2)
def test_hessians_per_sample_on_every_rank_and_their_gradient(name: str) -> None:
    each = torch.func.vmap(torch.func.hessian(SECOND[name]), (None, 0))
    w, x = (torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4).squeeze(0) for rows in (1, 6))
    alike = fp.compile(each, Mesh(data=2), in_specs=(P(), P()), out_specs=P())(w, x)
    torch.testing.assert_close(alike, each(w, x), rtol=1e-12, atol=1e-12)
    squares = lambda w, x: each(w, x).square().sum()  # noqa: E731
    step = fp.compile(fp.grad(fp.zero(3, "data")(squares)), Mesh(data=2))
    torch.testing.assert_close(step(w, x), torch.func.grad(squares)(w, x), rtol=1e-10, atol=1e-10)


def test_a_tangent_of_zeros_that_is_viewed() -> None:
    """Zero times infinity is zero for it; and what it is added to is not written to with the sum."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zero = torch._efficientzerotensor((2, 2))
        total = x + zero.view(4)
        total += 1
        return total, x * 1, zero.reshape(4) * torch.inf, x - zero.view(4), zero.view(4) - x, zero.view(4) / x

    x = torch.arange(4.0) + 1
    found = fp.compile(f, Mesh(data=2), in_specs=P(), out_specs=(P(),) * 6)(x)
    for result, wanted in zip(found, (x + 1, x, 0 * x, x, -x, 0 * x), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
