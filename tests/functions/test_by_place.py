"""Arguments given by name are those given by place, wherever a plan's function is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.functions.keywords import bind_positional, call_signature
from sharding_specs import Mesh, P

MESH = Mesh(data=2)
W, X, Y = torch.ones(4), torch.arange(16.0).view(4, 4), torch.arange(4.0)
WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 1.0])


def loss(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: Any = None, power: int = 2) -> torch.Tensor:
    error = (x @ w - y) ** power
    return (error if weights is None else error * weights).mean()


def of_names(a: Any, b: Any, c: Any = "c", d: Any = "d", e: Any = "e") -> tuple[Any, ...]:
    return a, b, c, d, e


@given(st.integers(0, 5), st.sets(st.sampled_from("abcde")))
def test_a_call_by_name_is_one_by_place(first: int, named: set[str]) -> None:
    """What python makes of a call is what it makes of the same call by place alone."""
    args, names = tuple(range(first)), {name: f"given {name}" for name in named}
    try:
        wanted = of_names(*args, **names)
    except TypeError:
        if names:
            with pytest.raises(TypeError, match=r"of_names\(a: .*: (missing|multiple)"):
                bind_positional(call_signature(of_names), "of_names", args, names)
        return
    found = bind_positional(call_signature(of_names), "of_names", args, names)
    assert of_names(*found) == wanted
    assert len(found) == max([first, *("abcde".index(name) + 1 for name in named)])


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a plan": (lambda f: fp.compile(fp.data_parallel("data")(f), MESH), lambda f: f),
    "its gradient": (lambda f: fp.compile(fp.grad(fp.data_parallel("data")(f)), MESH), fp.grad),
    "a gradient in a plan": (
        lambda f: fp.compile(fp.tensor_parallel("data", P("data"))(fp.grad(f)), MESH),
        fp.grad,
    ),
    "zero, microbatches": (
        lambda f: fp.compile(fp.grad_and_value(fp.chain(fp.zero(3, "data", P()), fp.accumulate(2))(f)), MESH),
        fp.grad_and_value,
    ),
    "a body": (lambda f: fp.compile(f, MESH, in_specs=(P(),) * 5, out_specs=P()), lambda f: f),
}


@pytest.mark.parametrize("name", CALLS)
def test_wherever_it_is_called(name: str) -> None:
    made, plain = CALLS[name]
    wanted = plain(loss)(W, X, Y, WEIGHTS, 3)
    torch.testing.assert_close(made(loss)(W, X, Y, WEIGHTS, 3), wanted)
    torch.testing.assert_close(made(loss)(W, X, power=3, weights=WEIGHTS, y=Y), wanted)
    assert str(made(loss).lower(W, X, Y, power=3)) == str(made(loss).lower(W, X, Y, None, 3))


def test_a_training_step_takes_its_batch_by_name() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), MESH, fp.zero(1, "data"))
    by_name, _ = train(train.init(W), X, weights=WEIGHTS, y=Y)
    placed, _ = train(train.init(W), X, Y, WEIGHTS)
    torch.testing.assert_close(train.params(by_name), train.params(placed), rtol=0, atol=0)
    assert str(train.lower(W, X, y=Y)) == str(train.lower(W, X, Y))


def test_the_gradient_of_a_plain_function_closes_over_what_is_named() -> None:
    """As torch.func's does: a name need not have a place then."""

    def scaled(x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return (x * by).sum()

    torch.testing.assert_close(fp.grad(scaled)(X, by=WEIGHTS), WEIGHTS.expand(4, 4))


def test_names_that_have_no_place() -> None:
    step = fp.compile(fp.data_parallel("data")(loss), MESH)
    with pytest.raises(TypeError, match=r"loss\(w: .*\) .*: got an unexpected keyword argument 'mask'"):
        step(W, X, Y, mask=WEIGHTS)
    bound = fp.compile(fp.data_parallel("data")(partial(loss, power=3)), MESH)
    assert bound(W, X, Y) == loss(W, X, Y, power=3)
    with pytest.raises(TypeError, match=r"has no place for 'power', and specs go by place: let it take them by"):
        bound(W, X, Y, power=2)
    silent = fp.compile(fp.data_parallel("data")(max), MESH)
    with pytest.raises(TypeError, match="max does not say what its arguments are called: give 'key' by place"):
        silent(X, key=len)
