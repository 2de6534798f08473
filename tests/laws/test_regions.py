"""A `shard_map` function inside a plan or a body: a region of the program that is local to axes of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import CustomFunctionError, LayoutError, OutSpecError
from sharding_specs import Mesh, P

from ..processes import run_on_processes

RANKS = 2
SEQ = Mesh(seq=RANKS)
MESH = Mesh(data=2, tensor=2, seq=RANKS)
Params = dict[str, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values go around; each rank holds its part of the queries."""
    total, weight = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    largest = torch.full_like(weight, -torch.inf)
    for turn in range(RANKS):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
        scale, shares = (largest - higher).exp(), (scores - higher).exp()
        total, weight, largest = total * scale + shares @ v, weight * scale + shares.sum(-1, keepdim=True), higher
        if turn < RANKS - 1:
            k, v = (fp.ppermute(x, "seq", [(i, (i + 1) % RANKS) for i in range(RANKS)]) for x in (k, v))
    return total / weight


ROWS = P(None, "seq")
in_ring = fp.shard_map(ring, SEQ, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS)


def norm(gain: Tensor, x: Tensor) -> Tensor:
    """A parameter that all ranks hold whole meets slices: its gradient is summed over them."""
    return gain * x / x.square().mean(1, keepdim=True).sqrt()


def norm_of_slices(gain: Tensor, x: Tensor) -> Tensor:
    return gain * x / fp.pmean(x.square().mean(1, keepdim=True), "seq").sqrt()


in_slices = fp.shard_map(norm_of_slices, SEQ, in_specs=(P(), ROWS), out_specs=ROWS)


def model(attend: Callable[..., Tensor], scale: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        h = scale(p["gain"], x @ p["in"])
        h = attend(h, h.tanh(), h.sin())
        return ((h @ p["out"] - y) ** 2).mean()

    return loss


plain, parallel = model(attention, norm), model(in_ring, in_slices)


def drawn() -> tuple[Params, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"in": (6, 8), "gain": (8,), "out": (8, 6)}
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {name: draw(*shape) for name, shape in shapes.items()}, draw(4, 8, 6), draw(4, 8, 6)


TENSOR = fp.tensor_parallel("tensor", {"in": P(None, "tensor"), "gain": P("tensor"), "out": P("tensor")})
PLANS = {
    "tensor": TENSOR,
    "data": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "zero 3": fp.chain(TENSOR, fp.zero(3, "data")),
    "accumulated": fp.chain(TENSOR, fp.zero(2, "data"), fp.accumulate(2)),
    "again": fp.chain(fp.remat("layers"), fp.zero(3, "data")),
    "pipeline": fp.chain(fp.data_parallel("data"), fp.pipeline("tensor", microbatches=2)),
}


TRAINED = ["zero 3", "accumulated"]  # the others are trained when it may take long; and these only differentiated


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in TRAINED else ()) for n in PLANS])
def test_in_a_plan(name: str) -> None:
    args = drawn()
    step = fp.compile(fp.grad_and_value(PLANS[name](parallel)), MESH)
    torch.testing.assert_close(step(*args), torch.func.grad_and_value(plain)(*args), rtol=1e-11, atol=1e-12)
    assert ("ppermute", ("seq",)) in step.program.counts()


@pytest.mark.parametrize("name", [*TRAINED, *(pytest.param(n, marks=pytest.mark.slow) for n in ("data", "pipeline"))])
def test_in_training(name: str) -> None:
    params, x, y = drawn()
    train = fp.train_step(parallel, fp.optim.sgd(0.5), MESH, PLANS[name])
    state, metrics = train(train.init(params), x, y)
    grads, value = torch.func.grad_and_value(plain)(params, x, y)
    wanted = {name: params[name] - 0.5 * grads[name] for name in params}
    torch.testing.assert_close((train.params(state), metrics.loss), (wanted, value), rtol=1e-11, atol=1e-12)
    assert ("ppermute", ("seq",)) in train.program.counts()


def on_a_process(rank: int) -> Any:
    plan = fp.chain(TENSOR, fp.zero(3, "data"))
    return fp.compile(fp.grad(plan(parallel)), Mesh(data=1, tensor=2, seq=RANKS))(*drawn())


def test_on_processes() -> None:
    wanted = torch.func.grad(plain)(*drawn())
    for found in run_on_processes(on_a_process, 4):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def penalty(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x, y: loss(p, x, y) + torch.func.grad(loss, argnums=1)(p, x, y).square().sum()


def adapted(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def after_a_step(p: Params, x: Tensor, y: Tensor) -> Tensor:
        grads = torch.func.grad(loss)(p, x[:2], y[:2])
        return loss({name: p[name] - 0.1 * grads[name] for name in p}, x[2:], y[2:])

    return after_a_step


def tangent(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x, y: torch.func.jvp(lambda x: loss(p, x, y), (x,), (y,))[1]


def of_each(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def variance(p: Params, x: Tensor, y: Tensor) -> Tensor:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(p, x[:, None], y[:, None])
        return sum(leaf.var(0).sum() for leaf in each.values())

    return variance


AROUND = product([penalty, adapted, tangent, of_each], ["tensor", "data", "zero 3"])


@pytest.mark.parametrize(
    ("around", "name"),  # one case in three always: each derivative, and each plan
    [pytest.param(*case, marks=() if i in (1, 5, 6, 10) else pytest.mark.slow) for i, case in enumerate(AROUND)],
)
def test_derivatives_inside_the_plan(around: Callable[..., Any], name: str) -> None:
    args = drawn()
    found = fp.compile(fp.grad_and_value(PLANS[name](around(parallel))), MESH)(*args)
    torch.testing.assert_close(found, torch.func.grad_and_value(around(plain))(*args), rtol=1e-10, atol=1e-11)


def test_in_a_body() -> None:
    """Of what all ranks along its axis hold; the other axis is the body's own."""
    args = drawn()

    def body(p: Params, x: Tensor, y: Tensor) -> tuple[Params, Tensor]:
        return fp.grad_and_value(lambda p: fp.pmean(parallel(p, x, y), "data"))(p)

    specs = (P(), P("data"), P("data"))
    found = fp.compile(body, MESH, in_specs=specs, out_specs=P())(*args)
    torch.testing.assert_close(found, torch.func.grad_and_value(plain)(*args), rtol=1e-11, atol=1e-12)


SPLIT = [P(("seq", "tensor")), P(("tensor", "seq")), P((3, "seq")), P("seq", "tensor"), P(None, ("seq", 2))]


@pytest.mark.parametrize("spec", SPLIT, ids=str)
def test_slices_of_several_axes(spec: P) -> None:
    """Each rank writes its number on its slice."""
    x, mesh = torch.arange(12.0 * 4).reshape(12, 4), Mesh(tensor=2, seq=2)
    number = lambda x: x * sum(10**place * (1 + fp.axis_index(axis)) for place, axis in enumerate(sorted(spec.axes)))  # noqa: E731
    region = fp.shard_map(number, mesh, spec, spec)
    plan = fp.data_parallel("data", batch=P())
    found = fp.compile(plan(lambda w, x: region(x)), Mesh(data=2, tensor=2, seq=2))(x[0], x)
    assert torch.equal(found, region(x)) and found.unique().numel() > 40


# -----------------------------------------------------------------------------
# What is refused
# -----------------------------------------------------------------------------


def refusal(error: type[Exception], f: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(error) as found:
        f(*args)
    return str(found.value)


def in_data_parallel(f: Callable[..., Any]) -> Callable[..., Any]:
    return fp.compile(fp.grad(fp.data_parallel("data")(f)), MESH)


def test_an_axis_of_the_plan_may_be_the_regions() -> None:
    region = fp.shard_map(lambda x: x * fp.psum(x, ("data", "seq")), MESH, P("data", "seq"), P("data", "seq"))
    step = in_data_parallel(lambda w, x: (region(x) * w).sum())
    assert torch.equal(step(torch.ones(()), torch.ones(4, 4)), torch.tensor(64.0))


def test_a_mesh_that_is_another() -> None:
    region = fp.shard_map(lambda x: x, Mesh(seq=4), P("seq"), P("seq"))
    step = fp.compile(lambda x: region(x), MESH, in_specs=P(), out_specs=P())
    found = refusal(LayoutError, step, torch.ones(4))
    assert "Mesh(seq=4) does not fit the axes bound here: data=2, tensor=2, seq=2" in found


def test_what_is_local_already() -> None:
    step = fp.compile(lambda x: in_ring(x, x, x), MESH, in_specs=ROWS, out_specs=ROWS)
    found = refusal(fp.ArgumentSpecError, step, torch.ones(1, 4, 2))
    assert "P() is declared, but" in found and "'seq'" in found


def test_what_a_body_returns_is_checked() -> None:
    args = torch.ones(4), torch.ones(4)
    region = fp.shard_map(lambda x: x.sum(), SEQ, P("seq"), P())
    step = in_data_parallel(lambda w, x: region(w) * x.sum())
    assert "a missing psum? write fp.psum(x, 'seq')" in refusal(OutSpecError, step, *args)
    region = fp.shard_map(lambda x: x, SEQ, P("seq"), P(unreduced={"seq"}))
    assert "neither partial sums nor padded" in refusal(LayoutError, step, *args)


def test_collectives_by_hand_without_a_region() -> None:
    """Their casts cannot be implied: the plan's function is differentiated when they are no longer to be seen."""

    def loss(w: Tensor, x: Tensor, cast: Callable[..., Tensor] = lambda w, axis: w) -> Tensor:
        return fp.pmean((fp.pscatter(x, "seq", dim=1) * cast(w, "seq")).square().mean(), "seq")

    args = torch.tensor(3.0), torch.arange(8.0).reshape(2, 4)
    found = refusal(OutSpecError, in_data_parallel(loss), *args)
    assert "fp.pvary(x, 'seq') on what meets a value that varies; in an fp.shard_map" in found
    step = in_data_parallel(lambda w, x: loss(w, x, fp.pvary))
    assert torch.equal(step(*args), torch.func.grad(lambda w: (args[1] * w).square().mean())(args[0]))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def test_a_function_in_a_region_does_not_lose_its_backward() -> None:
    region = fp.shard_map(Doubled.apply, SEQ, P("seq"), P("seq"))
    step = in_data_parallel(lambda w, x: (region(w) * x).sum())
    assert "Doubled would lose its backward" in refusal(CustomFunctionError, step, torch.ones(4), torch.ones(4))
