"""torch's own draws inside a traced function are keyed by global position, as dropout is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import RandomKeyError, TracingError
from sharding_specs import Mesh, P

KEY = fp.random.key(7)


def drawn(draw: Callable[[Tensor], Any], x: Tensor, key: Tensor = KEY) -> Any:
    """The numbers that one rank draws."""
    return fp.compile(keyed(draw), Mesh(), in_specs=(P(), P()), out_specs=P())(x, key)


def keyed(draw: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    def f(x: Tensor, key: Tensor) -> Any:
        with fp.random.using(key):
            return draw(x)

    return f


def half(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


#: draw, mean, variance
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), 1 / 2, 1 / 12),
    "rand_like": (torch.rand_like, 1 / 2, 1 / 12),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1, 16 / 12),
    "randn": (lambda x: torch.randn(*x.shape, dtype=x.dtype), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal_": (lambda x: (x * 1).normal_(2, 3), 2, 9),
    "normal of a size": (lambda x: torch.normal(1.0, 2.0, x.shape, dtype=x.dtype), 1, 4),
    "normal of means": (lambda x: torch.normal(x, 2.0), 0, 4),
    "normal of deviations": (lambda x: torch.normal(1.0, x + 2), 1, 4),
    "normal of both": (lambda x: torch.normal(x + 1, half(x)), 1, 1 / 4),
    "Normal.rsample": (lambda x: torch.distributions.Normal(x, 1.0).rsample(), 0, 1),
    "bernoulli": (lambda x: torch.bernoulli(half(x)), 1 / 2, 1 / 4),
    "bernoulli of one p": (lambda x: torch.bernoulli(x, 0.25), 1 / 4, 3 / 16),
    "bernoulli_": (lambda x: (x * 1).bernoulli_(0.25), 1 / 4, 3 / 16),
    "bernoulli_ of many": (lambda x: (x * 1).bernoulli_(half(x)), 1 / 2, 1 / 4),
    "exponential_": (lambda x: (x * 1).exponential_(2.0), 1 / 2, 1 / 4),
    "log_normal_": (lambda x: (x * 1).log_normal_(0, 0.5), math.exp(1 / 8), math.exp(1 / 4) * (math.exp(1 / 4) - 1)),
    "geometric_": (lambda x: (x * 1).geometric_(0.5), 2, 2),
    "cauchy_": (lambda x: (x * 1).cauchy_().atan(), 0, math.pi**2 / 12),
    "randint": (lambda x: torch.randint(4, x.shape).to(x.dtype), 3 / 2, 15 / 12),
    "randint from": (lambda x: torch.randint(-2, 2, x.shape).to(x.dtype), -1 / 2, 15 / 12),
    "randint_like": (lambda x: torch.randint_like(x, 4), 3 / 2, 15 / 12),
    "randint_like from": (lambda x: torch.randint_like(x, -2, 2), -1 / 2, 15 / 12),
    "random_": (lambda x: (x * 1).random_(4), 3 / 2, 15 / 12),
    "random_ from": (lambda x: (x * 1).random_(-2, 2), -1 / 2, 15 / 12),
    "randperm": (lambda x: torch.randperm(x.numel()).reshape(x.shape).to(x.dtype) / x.numel(), 1 / 2, 1 / 12),
    "gumbel": (
        lambda x: -torch.empty_like(x).exponential_().log(),
        0.5772156649,
        math.pi**2 / 6,
    ),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.every(3)
def test_moments_and_the_same_numbers_on_every_mesh(name: str) -> None:
    draw, mean, variance = DRAWS[name]
    x = torch.zeros(16, 512, dtype=torch.float64)
    found = drawn(draw, x)
    assert abs(found.mean() - mean) < 5 * math.sqrt(variance / x.numel())
    assert abs(found.var() - variance) < 0.1 * variance
    assert torch.equal(found, drawn(draw, x)) and not torch.equal(found, drawn(draw, x, fp.random.key(8)))
    for spec in (P("axis"), P(None, "axis")):
        local = fp.partition(keyed(draw), "axis", (spec, P()), parameters=None)
        assert torch.equal(fp.compile(local, Mesh(axis=2))(x, KEY), found)


def test_a_permutation_has_every_number_once() -> None:
    found = drawn(lambda x: torch.randperm(100, dtype=torch.int32), torch.zeros(()))
    assert found.dtype == torch.int32 and torch.equal(found.sort().values, torch.arange(100, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_draws_have_the_type_that_torch_gives(dtype: torch.dtype) -> None:
    names = ("rand_like", "uniform_", "randn_like", "normal_", "bernoulli", "exponential_", "randint_like")
    all_found = drawn(lambda x: tuple(DRAWS[name][0](x) for name in names), torch.zeros(64, 64, dtype=dtype))
    for name, found in zip(names, all_found, strict=True):
        assert found.dtype == dtype and bool(found.isfinite().all())
        assert abs(float(found.float().mean()) - DRAWS[name][1]) < 0.15


# -----------------------------------------------------------------------------
# In models
# -----------------------------------------------------------------------------


def drop_path(x: Tensor, rate: float = 0.5) -> Tensor:
    """Stochastic depth, as models of images write it."""
    keep = 1 - rate
    kept = keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x.div(keep) * kept.floor_()


def noisy(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x + drop_path(torch.tanh(x @ params["w"]))
    h = h + drop_path(torch.tanh(h @ params["w"])) + 0.1 * torch.randn_like(h)
    return (h * torch.rand(h.shape, dtype=h.dtype)).square().mean()


PLANS: list[tuple[Any, Mesh]] = [
    (None, Mesh(data=1)),
    (fp.zero(3, "data"), Mesh(data=4)),
    (fp.chain(fp.data_parallel("data"), fp.accumulate(2)), Mesh(data=2)),
    (fp.accumulate(4), Mesh(data=1)),
    (
        fp.chain(fp.tensor_parallel("tensor", {"w": P(None, "tensor")}), fp.data_parallel("data")),
        Mesh(data=2, tensor=2),
    ),
    (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
    (fp.remat("nothing"), Mesh(data=1)),
]


def test_a_model_draws_the_same_on_every_mesh_and_in_microbatches() -> None:
    params = {"w": torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)}
    x = torch.linspace(-2, 2, 32, dtype=torch.float64).reshape(8, 4)

    def run(plan: Any, mesh: Mesh) -> list[Tensor]:
        train = fp.train_step(noisy, fp.optim.sgd(0.1), mesh, plan, seed=3)
        state, losses = train.init(params), []
        for _ in range(2):
            state, metrics = train(state, x)
            losses.append(metrics.loss)
        return [*losses, train.params(state)["w"]]

    wanted = run(*PLANS[0])
    assert wanted[0] != wanted[1]
    for plan, mesh in PLANS[1:]:
        torch.testing.assert_close(run(plan, mesh), wanted, rtol=1e-12, atol=1e-14)


def test_a_layer_drop_of_probability_0_is_decided_in_the_trace() -> None:
    def model(x: Tensor) -> Tensor:
        if torch.rand([]) < 0.0 or bool(torch.rand(()) >= 1) or torch.rand(()) > 1.0:
            return x * 3
        return x * 2 if torch.rand([]) < 1 and torch.rand([]) >= 0 else x

    assert torch.equal(drawn(model, torch.ones(3)), torch.full((3,), 2.0))


def test_a_layer_drop_that_is_drawn_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return x * 3 if torch.rand([]) < 0.5 else x

    with pytest.raises(TracingError, match=r"test_torchs_draws.py.*branches on a random number.*torch\.where"):
        drawn(model, torch.ones(3))


# -----------------------------------------------------------------------------
# Refusals
# -----------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "multinomial": (lambda x: torch.multinomial(x + 1, 2), r"aten\.multinomial\.default draws"),
    "poisson": (torch.poisson, r"aten\.poisson\.default draws"),
    "generator": (
        lambda x: torch.rand(x.shape, generator=torch.Generator()),
        r"aten\.rand\.generator with a generator= draws",
    ),
    "uniform_ with a generator": (
        lambda x: (x * 1).uniform_(generator=torch.Generator()),
        r"aten\.uniform_\.default with a generator= draws",
    ),
    "random_ without bounds": (lambda x: (x * 1).random_(), r"aten\.random_\.default draws.*random_ with bounds"),
    "complex": (lambda x: torch.rand(3, dtype=torch.complex64).abs(), r"aten\.rand\.default draws.*real numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_keyed_draw_is_refused_by_name(name: str) -> None:
    draw, message = REFUSED[name]
    with pytest.raises(TracingError, match=rf"test_torchs_draws.py.*{message}"):
        drawn(draw, torch.ones(3))


def test_a_draw_without_a_key_names_the_draw_and_the_ways_out() -> None:
    step = fp.compile(torch.rand_like, Mesh(), in_specs=P(), out_specs=P())
    with pytest.raises(
        RandomKeyError, match=r"torch\.rand_like draws random numbers, but no key.*train_step\(seed=…\)"
    ):
        step(torch.ones(3))
