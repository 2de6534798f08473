"""What hides a derivative from a trace: `torch.no_grad` is kept to, inference mode left for the trace, and a user's
autograd.Function refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from functional_parallel.errors import CustomFunctionError
from sharding_specs import Mesh, P

from .processes import run_on_processes

DATA = Mesh(data=2)
W = torch.arange(16.0, dtype=torch.float64).view(4, 4) % 5 - 2
X = torch.arange(64.0, dtype=torch.float64).view(4, 1, 4, 4) % 7 - 3

Op = Callable[[torch.Tensor], torch.Tensor]


def stopped(op: Op) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        with torch.no_grad():
            factor = op(h)
        return (h * factor).sum()

    return f


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def viewed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).reshape(x.shape)


def normalised(x: torch.Tensor) -> torch.Tensor:
    """An op of several results."""
    return F.layer_norm(x, x.shape[-1:])


def halved(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Over samples, and so over ranks; and over what every rank has."""
    return x.amax(0, keepdim=True) * x.amin() + x.amax(-1, keepdim=True)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Twice x, where both ranks hold the same."""
    return fp.pvary(fp.psum(x, "tensor"), "tensor")


def in_a_body(f: Callable[..., Any]) -> torch.Tensor:
    """What one of two ranks computes, both on the same values, which the types do not know."""
    step = fp.compile(lambda w, x: f(w, x), Mesh(tensor=2), in_specs=(P("tensor"), P()), out_specs=P("tensor"))
    both: torch.Tensor = step(torch.cat([W, W]), X)
    assert torch.equal(both[:4], both[4:])
    return both[:4]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-9)


def overwritten(x: torch.Tensor) -> torch.Tensor:
    """No gradient goes to what was there before, which has none itself."""
    return (x * 2).relu_().add_(x).flatten()[: x.numel()].mul_(3).view(x.shape)


def changed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Whose gradient goes where it would without the changes: torch does not see them."""
    h = x @ w
    with torch.no_grad():
        h.mul_(2)
        h[..., 0].clamp_min_(h.sum())
        w.add_(1)
    return (h * h).sum() + (w * w).sum()


OPS = [attention, doubled, viewed, normalised, halved, largest, overwritten]
PLANS = [fp.data_parallel("data"), fp.zero(3, "data"), fp.tensor_parallel("data", {"": P(None, "data")})]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_changed_in_place_without_gradients(plan: Any) -> None:
    def derivatives(f: Callable[..., Any], gradient: Callable[..., Any]) -> list[Any]:
        tangent = torch.func.jvp(lambda w: f(w, X), (W.clone(),), (torch.ones_like(W),))
        second = torch.func.jvp(lambda w: gradient(w, X), (W.clone(),), (torch.ones_like(W),))
        return [gradient(W.clone(), X), tangent, second, torch.func.grad(f)(W.clone(), X)]

    found = derivatives(fp.compile(plan(changed), DATA), fp.compile(fp.grad(plan(changed)), DATA))
    close(found, derivatives(changed, torch.func.grad(changed)))
    twice = fp.chain(plan, fp.data_parallel("replicas", batch=P()))  # its trace is traced again
    close(fp.compile(fp.grad(twice(changed)), Mesh(data=2, replicas=2))(W, X), found[0])


def test_changed_in_place_without_gradients_in_a_body() -> None:
    close(in_a_body(fp.grad(changed)), torch.func.grad(changed)(W.clone(), X))


def test_each_samples_gradient_of_what_is_changed_without_gradients() -> None:
    f = fp.compile(fp.vmap(fp.grad(fp.zero(0, "data", batch=P())(changed)), (None, 0)), DATA)
    close(f(W, X), torch.func.vmap(torch.func.grad(lambda w, x: changed(w * 1, x)), (None, 0))(W, X))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_cosine_similarity(plan: Any) -> None:
    """Of whose norms torch bounds the numbers alone."""

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(x @ w, (x @ w).roll(1, 1), dim=-1).sum()

    w = W + torch.eye(4, dtype=W.dtype) / 3
    close(fp.compile(fp.grad(plan(f)), DATA)(w, X), torch.func.grad(f)(w, X))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.every(2)
def test_no_grad_in_a_plan(plan: Any, op: Op) -> None:
    close(fp.compile(fp.grad(plan(stopped(op))), DATA)(W, X), torch.func.grad(stopped(op))(W, X))


@pytest.mark.parametrize("op", OPS[1:])  # torch has no tangents of its attention
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.every(2)
def test_no_grad_in_a_plan_stops_no_tangents(plan: Any, op: Op) -> None:
    """As in torch, where it is said to be for the reverse mode alone; and of a gradient both are asked."""
    direction = torch.ones_like(W)

    def wanted(f: Callable[..., Any]) -> Any:
        return torch.func.jvp(lambda w: f(w, X), (W,), (direction,))

    f, compiled = stopped(op), fp.compile(plan(stopped(op)), DATA)
    close(wanted(compiled), wanted(f))
    close(wanted(fp.compile(fp.grad(plan(f)), DATA)), wanted(torch.func.grad(f)))
    close(torch.func.grad(compiled)(W, X), torch.func.grad(f)(W, X))
    close(wanted(torch.func.grad(compiled)), wanted(torch.func.grad(f)))


@pytest.mark.parametrize("op", [*OPS, summed])
def test_no_grad_in_a_body(op: Op) -> None:
    wanted = torch.func.grad(stopped(doubled if op is summed else op))(W, X)
    close(in_a_body(fp.grad(stopped(op))), wanted)


@pytest.mark.parametrize("op", [*OPS[1:], summed])
def test_no_grad_in_a_body_stops_no_tangents(op: Op) -> None:
    def tangent(f: Callable[..., Any]) -> Any:
        return lambda w, x: fp.jvp(lambda v: f(v, x), (w,), (torch.ones_like(w),))[1].expand(4)

    close(in_a_body(tangent(stopped(op))), tangent(stopped(doubled if op is summed else op))(W, X))


def on_a_process(rank: int) -> list[Any]:
    """Derivatives of compiled functions, which nothing has called before: not even the runtime is there."""
    found = []
    for op in OPS[1:]:
        f = fp.compile(PLANS[0](stopped(op)), DATA)
        gradient = torch.func.grad(f)(W, X)
        found.append((gradient, torch.func.jvp(lambda w, f=f: f(w, X), (W,), (torch.ones_like(W),))))
    return found


def test_no_grad_on_processes() -> None:
    for found in run_on_processes(on_a_process, 2):
        for op, (gradient, of_value) in zip(OPS[1:], found, strict=True):
            f = stopped(op)
            close(gradient, torch.func.grad(f)(W, X))
            close(of_value, torch.func.jvp(lambda w, f=f: f(w, X), (W,), (torch.ones_like(W),)))


@pytest.mark.filterwarnings("ignore::functional_parallel.EqualCopiesWarning")  # the sum is n times the value on purpose
@pytest.mark.parametrize("size", [1, 2])
def test_no_grad_around_a_cast_alone(size: int) -> None:
    """It moves nothing, on one rank no collective does; a derivative stops there all the same."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = fp.pvary(x, "data")
        return fp.psum((fp.pvary(x, "data") * factor).sum(), "data")

    step = fp.compile(f, Mesh(data=size), in_specs=P(), out_specs=P())
    assert torch.equal(torch.func.grad(step)(W), size * W)
    assert torch.equal(fp.compile(fp.grad(f), Mesh(data=size), in_specs=P(), out_specs=P())(W), size * W)
    assert torch.equal(torch.func.jvp(step, (W,), (torch.ones_like(W),))[1], 2 * size * W.sum())


def test_no_grad_around_a_collective_in_a_plan_in_a_body() -> None:
    f = fp.grad(fp.zero(0, "data")(stopped(summed)))
    step = fp.compile(
        lambda w, x: f(w, x), Mesh(data=2, tensor=2), in_specs=(P("tensor"), P("data")), out_specs=P("tensor")
    )
    assert torch.equal(step(torch.cat([W, W]), X)[:4], torch.func.grad(stopped(doubled))(W, X))


def test_no_grad_around_a_collective_under_the_vmap_oracle() -> None:
    """With no trace, for comparison: torch itself keeps to it."""
    f = fp.vmap(torch.func.grad(stopped(summed)), (None, 0), axis_name="tensor")
    assert torch.equal(f(W, torch.stack([X, X]))[0], torch.func.grad(stopped(doubled))(W, X))


LIBRARY = torch.library.Library("hidden_tests", "DEF")
LIBRARY.define("tripled(Tensor x) -> Tensor")
LIBRARY.impl("tripled", lambda x: 3 * x, "CompositeExplicitAutograd")
torch.library.register_fake("hidden_tests::tripled", torch.empty_like, lib=LIBRARY)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hidden_tests.tripled(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * cotangent


fp.register_rule(torch.ops.hidden_tests.tripled, "~... -> ...", function=Tripled.apply)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_users_op_has_its_derivative_in_a_compiled_function_too(plan: Any) -> None:
    f = total(Tripled.apply)
    close(torch.func.grad(fp.compile(plan(f), DATA))(W, X), torch.func.grad(lambda w, x: 3 * (x @ w).sum())(W, X))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_function_that_is_first_called_in_inference_mode(plan: Any) -> None:
    """There torch leaves `matmul` whole, of which no rule says how it is split; and later calls have derivatives."""

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sum()

    compiled, usual = fp.compile(plan(f), DATA), fp.compile(plan(f), DATA)
    with torch.inference_mode():
        close(compiled(W, X), f(W, X))
    usual(W, X)
    assert compiled.program.lines() == usual.program.lines()
    close(torch.func.grad(compiled)(W, X), torch.func.grad(f)(W, X))


def hidden(inside: Op) -> Op:
    """An autograd.Function with that forward, and a backward which no trace of the forward can tell."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return inside(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return cotangent * 1000

    return Hidden.apply  # type: ignore[no-any-return]


def total(op: Op) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda w, x: op(x @ w).sum()


@pytest.mark.parametrize("inside", [attention, doubled])
def test_a_function_is_refused_whatever_its_forward_calls(inside: Op) -> None:
    """Also one of the library's own ops, which a trace records as one whose derivative is known."""
    with pytest.raises(CustomFunctionError, match="Hidden would lose its backward"):
        fp.compile(fp.grad(fp.data_parallel("data")(total(hidden(inside)))), DATA)(W, X)


@pytest.mark.parametrize("inside", [attention, doubled, summed])
def test_a_function_is_refused_under_a_derivative_in_a_body(inside: Op) -> None:
    with pytest.raises(CustomFunctionError, match="Hidden would lose its backward"):
        in_a_body(fp.grad(total(hidden(inside))))


def test_a_function_around_a_plan_keeps_its_backward() -> None:
    """What stands around a trace is none of its concern."""
    ranks = fp.vmap(fp.vmap(fp.data_parallel("data")(summed), 0, axis_name="data"), 0, axis_name="tensor")

    def inside(x: torch.Tensor) -> torch.Tensor:
        return ranks(x.expand(2, *x.shape).reshape(2, 2, 2, 1, 4, 4))[0].reshape(x.shape)

    x = X.clone().requires_grad_()
    y = hidden(inside)(x)
    y.sum().backward()
    assert torch.equal(y, 2 * X) and torch.equal(x.grad, torch.full_like(X, 1000))  # type: ignore[arg-type]


SAVED = {
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sqrt": lambda x: (x.square() + 1).sqrt(),
    "norm": lambda x: x.norm(dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cumprod": lambda x: (x.sin() + 2).cumprod(-1),
    "data": lambda x: x.tanh() * x.sin().data,
    "detach": lambda x: x.tanh() * x.sin().detach(),
}


@pytest.mark.filterwarnings("ignore::functional_parallel.PartitionWarning")  # backward ops have no rules
@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.zero(3, "data")], ids=str)
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.every(3)
def test_autograds_own_derivatives_inside_a_loss(name: str, plan: Any) -> None:
    """A backward that saves a result detaches it, which is not the user's doing; and `.data` is."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(SAVED[name](z @ w).sum(), z, create_graph=True)
        return found.square().sum() + SAVED[name](x @ w).sum()

    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf, x), leaf)
    found = fp.compile(fp.grad(plan(loss)), DATA)(w, x)
    torch.testing.assert_close(found, wanted)


# -----------------------------------------------------------------------------
# Library ops that have none
# -----------------------------------------------------------------------------

LIBRARY.define("squared(Tensor x) -> Tensor")
LIBRARY.impl("squared", lambda x: x * x, "CompositeExplicitAutograd")
torch.library.register_fake("hidden_tests::squared", torch.empty_like, lib=LIBRARY)
fp.register_rule(torch.ops.hidden_tests.squared, "... -> ...")


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        (fp.data_parallel("data"), Mesh(data=2)),
        (fp.tensor_parallel("tensor", P("tensor")), Mesh(tensor=2)),
        (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
    ],
)
def test_an_op_without_a_derivative_is_refused_where_one_is_taken(plan: Any, mesh: Mesh) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.ops.hidden_tests.squared(x * w)).sum() + w.sum()

    w, x = torch.ones(4), torch.ones(4, 4)
    with pytest.raises(CustomFunctionError, match=r"test_hidden_derivatives.*squared.* would silently be zero"):
        fp.compile(fp.grad(plan(loss)), mesh)(w, x)

    def without(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            peak = torch.ops.hidden_tests.squared(x * w)
        return torch.tanh(torch.tanh(x * w) * w).sum() + peak.sum()

    assert torch.isfinite(fp.compile(fp.grad(plan(without)), mesh)(w, x)).all()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_function_is_inlined_where_no_gradient_is_wanted(plan: Any) -> None:
    """Under torch.no_grad(). The same compiled function refuses it where a derivative may be taken of its program."""
    f = total(hidden(doubled))
    compiled, gradient = fp.compile(plan(f), DATA), fp.compile(fp.grad(plan(f)), DATA)
    with torch.no_grad():
        close(compiled(W, X), f(W, X))
        close(compiled(W, X), f(W, X))
        with pytest.raises(CustomFunctionError, match="Hidden would lose its backward"):
            gradient(W, X)
        inside = fp.compile(plan(lambda w, x: fp.grad(f)(w, x)), DATA)
        close(inside(W, X), fp.grad(f)(W, X))  # a derivative inside has been taken, with the function's backward
    with pytest.raises(CustomFunctionError, match="Hidden would lose its backward"):
        compiled(W, X)
    with pytest.raises(CustomFunctionError, match="Hidden would lose its backward"):
        torch.func.grad(compiled)(W, X)
