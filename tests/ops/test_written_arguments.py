"""Custom ops that write into arguments: their schemas say which, and programs have the values that eager code has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import CustomFunctionError, MutationError, PartitionError
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..program.test_memory import measured

MESH = Mesh(data=2)
pytestmark = pytest.mark.filterwarnings("ignore::functional_parallel.PartitionWarning")


@torch.library.custom_op("written::scale_", mutates_args={"x"})
def scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("written::swap_", mutates_args={"one", "other"})
def swap_(one: Tensor, by: Tensor, other: Tensor | None = None) -> Tensor:
    """Two operands are written, of which one may be missing, and a tensor is returned."""
    total = (one * by).sum(0)
    kept = one.clone()
    one.add_(by if other is None else other)
    if other is not None:
        other.copy_(kept)
    return total


@swap_.register_fake
def _(one: Tensor, by: Tensor, other: Tensor | None = None) -> Tensor:
    return one.new_empty(one.shape[1:])


def add_to_all(xs: list[Tensor], y: Tensor, *, alpha: float = 2.0) -> None:
    for x in xs:
        x.add_(y, alpha=alpha)


library = torch.library.Library("written", "FRAGMENT")
library.define("add_to_all_(Tensor(a!)[] xs, Tensor y, *, float alpha=2.0) -> ()")
library.impl("add_to_all_", add_to_all, "CompositeExplicitAutograd")
# torch has ops of these names, which do something else
library.define("relu_(Tensor(a!) self) -> Tensor(a!)")
library.impl("relu_", lambda x: x.mul_(7), "CompositeExplicitAutograd")
library.define("add_(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)")
library.impl("add_", lambda x, y, *, alpha=1: x.sub_(y, alpha=alpha), "CompositeExplicitAutograd")
library.define("first_(Tensor(a!) x, Tensor(b) y) -> Tensor(b)")
library.impl("first_", lambda x, y: y[0], "CompositeExplicitAutograd")
ops = torch.ops.written


def of_a_value(w: Tensor, x: Tensor) -> Tensor:
    k = (x * w).detach() * 1
    scale_(k, 2.0)
    return (x * w * k).sum()


def of_a_view(w: Tensor, x: Tensor) -> Tensor:
    k = (x * w).detach() * 1
    part = k[1:3].t()
    scale_(part, 3.0)
    k[0] += 1
    return (x * w * k).sum() + part.sum()


def of_two(w: Tensor, x: Tensor) -> Tensor:
    k, other = (x * w).detach() * 1, (x * w).detach() - 1
    once = swap_(k, x, other)
    twice = swap_(k, x)
    return (w * (once + twice)).sum() + (x * w * k * other).sum()


def of_a_list(w: Tensor, x: Tensor) -> Tensor:
    k, other = (x * w).detach() * 1, (x * w).detach() - 1
    ops.add_to_all_([k, other], x)
    ops.add_to_all_([k[0], k[1]], other[0], alpha=3.0)
    return (x * w * k * other).sum()


def of_what_is_returned(w: Tensor, x: Tensor) -> Tensor:
    k = (x * w).detach() * 1
    ops.relu_(k[0]).add_(1)
    ops.add_(k, x, alpha=2).mul_(2)
    return (x * w * k).sum()


def without_gradients(w: Tensor, x: Tensor) -> Tensor:
    """The values change, and the gradient is that of the old ones, as of a write by one of torch's ops."""
    k = x * w
    with torch.no_grad():
        scale_(k, 2.0)
    return k.sum()


FUNCTIONS = [of_a_value, of_a_view, of_two, of_a_list, of_what_is_returned, without_gradients]
PLANS: dict[str, Any] = {
    "data": fp.data_parallel("data"),
    "zero": fp.zero(3, "data"),
    "columns": fp.tensor_parallel("data", P("data")),
    "recomputed": fp.chain(fp.remat(), fp.data_parallel("data")),
}


def integers(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-4, 5, shape, generator=draw).double() for shape in ((4,), (4, 4)))  # type: ignore[return-value]


def by_autograd(f: Callable[..., Tensor], w: Tensor, x: Tensor) -> list[Tensor]:
    leaf = w.clone().requires_grad_()
    value = f(leaf, x)
    value.backward()
    assert leaf.grad is not None
    return [leaf.grad, value.detach()]


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_as_in_eager_code(f: Callable[..., Tensor], plan: str) -> None:
    """They were refused, and one with the name of an op of torch was taken for that."""
    w, x = integers(0)
    found = fp.compile(fp.grad_and_value(PLANS[plan](f)), MESH)(w, x)
    assert all(map(torch.equal, found, by_autograd(f, w, x)))


def a_program(seed: int, w: Tensor, x: Tensor) -> Tensor:
    """Random calls on random views."""
    draw = random.Random(seed)
    values = [(x * w).detach() * 1, (x * w).detach() + 1]
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t[1:],
        lambda t: t[::2],
        lambda t: t.t(),
        lambda t: t.select(draw.randrange(2), draw.randrange(4)),
        lambda t: t.diagonal(),
    ]
    for _ in range(6):
        view, kind = draw.choice(views), draw.randrange(4)
        state = draw.getstate()
        target = view(values[0])
        draw.setstate(state)
        operand = view(values[1])
        if kind == 0:
            scale_(target, draw.choice([2.0, -1.0]))
        elif kind == 1:
            swap_(target, operand)
        elif kind == 2:
            ops.add_to_all_([target, operand], view(x) if target.ndim == 2 else x[0, : len(target)])
        else:
            values.reverse()
    return (x * w * values[0] * values[1]).sum()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 16), plan=st.sampled_from(sorted(PLANS)))
def test_random_calls(seed: int, plan: str) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return a_program(seed, w, x)

    w, x = integers(seed)
    found = fp.compile(fp.grad_and_value(PLANS[plan](f)), MESH)(w, x)
    assert all(map(torch.equal, found, by_autograd(f, w, x)))


def on_a_rank(rank: int) -> list[list[Tensor]]:
    return [list(fp.compile(fp.grad_and_value(PLANS["zero"](f)), MESH)(*integers(1))) for f in FUNCTIONS]


def test_on_processes() -> None:
    for found in run_on_processes(on_a_rank, 2):
        for f, results in zip(FUNCTIONS, found, strict=True):
            assert all(map(torch.equal, results, by_autograd(f, *integers(1))))


@pytest.mark.parametrize("f", FUNCTIONS)
def test_the_memory_that_a_program_predicts(f: Callable[..., Tensor]) -> None:
    program = fp.compile(fp.grad_and_value(fp.data_parallel("data")(f)), MESH).lower(torch.ones(16), torch.ones(16, 16))
    assert program.memory().peak == measured(program)


# --- Derivatives and rules ---


def through(w: Tensor, x: Tensor) -> Tensor:
    k = x * w
    scale_(k, 2.0)
    return k.sum()


@pytest.mark.parametrize("take", [fp.grad, fp.hessian, lambda f: lambda w, x: fp.jvp(lambda w: f(w, x), (w,), (w,))[1]])
def test_a_derivative_through_a_write_is_refused(take: Any) -> None:
    """torch itself drops the write from the gradient, without a word."""
    plan = fp.data_parallel("data")
    f = plan(take(through)) if "lambda" in take.__name__ else take(plan(through))
    with pytest.raises(
        CustomFunctionError, match=r"test_written.*: written.scale_.default writes into an argument and has"
    ):
        fp.compile(f, MESH)(*integers(0))


def of_an_inner_gradient(w: Tensor, x: Tensor) -> Tensor:
    def inner(w: Tensor) -> Tensor:
        k = x * w
        scale_(k, 2.0)
        return (x * w * k.detach()).sum()

    return (torch.func.grad(inner)(w) * w).sum()


def of_rows(w: Tensor, x: Tensor) -> Tensor:
    def of_row(row: Tensor) -> Tensor:
        k = row * 1
        total = swap_(k[None], row[None])
        return (k * total * w).sum()

    return torch.func.vmap(of_row)(x).sum()


@pytest.mark.parametrize("f", [of_an_inner_gradient, of_rows])
def test_inside_a_derivative_or_a_vmap_of_the_loss(f: Callable[..., Tensor]) -> None:
    w, x = integers(2)
    found = fp.compile(fp.data_parallel("data")(f), MESH)(w, x)
    wanted = (2 * x * x * w * w).sum() if f is of_an_inner_gradient else (2 * x * x * x * w).sum()
    assert torch.equal(found, wanted)


def test_a_gradient_through_a_write_inside_the_loss_is_refused() -> None:
    """As torch computes it, it lacks the write."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(through)(w, x).sum()

    with pytest.raises(
        CustomFunctionError, match=r"written.scale_.default writes into an argument and has no derivative"
    ):
        fp.compile(fp.data_parallel("data")(f), MESH)(*integers(0))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        made = x.clone()
        ops.double_(made)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 2


def doubled(w: Tensor, x: Tensor) -> Tensor:
    k = x * w
    ops.double_(k)
    return (k * x).sum()


def test_a_rule_with_a_derivative() -> None:
    library.define("double_(Tensor(a!) x) -> ()")
    library.impl("double_", lambda x: _nothing(x.mul_(2)), "CompositeExplicitAutograd")
    w, x = integers(0)
    with pytest.raises(PartitionError, match=r"Give it one with fp.register_rule.written.double_.default"):
        fp.compile(fp.data_parallel("data", strict=True)(doubled), MESH)(w, x)
    fp.register_rule(ops.double_, "~... -> ...", function=Double.apply)
    step = fp.compile(fp.grad_and_value(fp.data_parallel("data", strict=True)(doubled)), MESH)
    grads, value = step(w, x)
    assert torch.equal(value, (2 * x * w * x).sum()) and torch.equal(grads, (2 * x * x).sum(0))
    assert step.program.counts() == {("psum", ("data",)): 2}  # of the loss and of the gradient: nothing is gathered
    fp.testing.assert_equivalent(lambda w, x: (2 * x * w * x).sum(), fp.data_parallel("data"), MESH, w, x, exact=True)


def _nothing(x: Tensor) -> None: ...


# --- Refusals ---


def test_memory_that_is_given_twice() -> None:
    def overlapping(w: Tensor, x: Tensor) -> Tensor:
        k = x * w
        swap_(k[:3], k[1:])
        return k.sum()

    def twice(w: Tensor, x: Tensor) -> Tensor:
        k = x * w
        ops.add_to_all_([k, k], x)
        return k.sum()

    for f in (overlapping, twice):
        with pytest.raises(MutationError, match=r"shares its memory.*pass a clone"):
            fp.compile(fp.data_parallel("data")(f), MESH)(*integers(0))


def test_a_tensor_that_is_closed_over() -> None:
    outside = torch.ones(4, 4).double()

    def f(w: Tensor, x: Tensor) -> Tensor:
        scale_(outside, 2.0)
        return (x * w * outside).sum()

    with pytest.raises(
        MutationError, match=r"written.scale_.default changes in place .* that the function closes over"
    ):
        fp.compile(fp.data_parallel("data")(f), MESH)(*integers(0))
    assert torch.equal(outside, torch.ones(4, 4).double())


def test_a_result_that_is_a_view_of_an_argument() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return (w * ops.first_(x * 1, x)).sum()

    with pytest.raises(
        MutationError, match=r"written.first_.default writes into x, and returns something else than new"
    ):
        fp.compile(fp.data_parallel("data")(f), MESH)(*integers(0))
