"""Arguments given by name are those given by place, wherever a plan's function is called, or have no place at all."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.functions.keywords import bind_positional, call_signature
from sharding_specs import Mesh, P, SpecError

from ..processes import run_on_processes

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


# --- Arguments that a function takes by keyword only ---


def by_keyword(
    w: torch.Tensor, x: torch.Tensor, *, y: torch.Tensor, weights: Any = None, power: int = 2
) -> torch.Tensor:
    return loss(w, x, y, weights, power)


def collated(w: torch.Tensor, **batch: Any) -> torch.Tensor:
    return loss(w, **batch)


def several(w: torch.Tensor, *inputs: torch.Tensor, y: torch.Tensor, **more: Any) -> torch.Tensor:
    return loss(w, *inputs, y, **more)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "a body"])
def test_arguments_by_keyword_only(name: str) -> None:
    """They were refused: layouts went by place."""
    made, plain = CALLS[name]
    wanted, more = plain(loss)(W, X, Y, WEIGHTS, 3), {"weights": WEIGHTS, "power": 3}
    torch.testing.assert_close(made(by_keyword)(W, X, y=Y, **more), wanted)
    torch.testing.assert_close(made(several)(W, X, **more, y=Y), wanted)
    if name != "a gradient in a plan":
        torch.testing.assert_close(made(collated)(W, y=Y, x=X, **more), wanted)
    placed, keyed = made(loss), made(by_keyword)
    assert placed.lower(W, X, Y).counts() == keyed.lower(W, X, y=Y).counts()


SPLIT = {
    "each": (P("data"), {"y": P("data"), "weights": P("data")}),
    "all": P("data"),
    "replicated": (P(), {"y": P(), "weights": P()}),
}


@pytest.mark.parametrize("batch", SPLIT)
def test_specs_of_arguments_by_keyword(batch: str) -> None:
    train = fp.train_step(by_keyword, fp.optim.sgd(0.1), MESH, fp.zero(1, "data", batch=SPLIT[batch]))
    _, metrics = train(train.init(W), X, y=Y, weights=WEIGHTS)
    torch.testing.assert_close(metrics.loss, loss(W, X, Y, WEIGHTS))
    split = {path: spec.axes for path, spec in zip(train.program.in_paths, train.program.in_specs, strict=True)}  # type: ignore[union-attr]
    wanted = frozenset() if batch == "replicated" else frozenset({"data"})
    assert {split["1/0"], split["1/1/y"], split["1/1/weights"]} == {wanted}


def test_a_spec_for_a_keyword_that_is_not_given() -> None:
    train = fp.train_step(by_keyword, fp.optim.sgd(0.1), MESH, fp.zero(1, "data", batch=(P("data"), {"z": P()})))
    with pytest.raises(SpecError, match="y: there is no spec for it"):
        train(train.init(W), X, y=Y)


def test_the_same_program_for_any_order_of_keywords() -> None:
    train = fp.train_step(collated, fp.optim.sgd(0.1), MESH, fp.zero(3, "data", P()))
    state, _ = train(train.init(W), x=X, y=Y, weights=WEIGHTS)
    first = train.program
    train(state, weights=WEIGHTS, y=Y, x=X)
    assert train.program is first


def keyed_on_a_rank(rank: int, own: bool) -> list[torch.Tensor]:
    train = fp.train_step(
        collated, fp.optim.sgd(0.1), MESH, fp.zero(1, "data"), reduction="ordered", batch="own" if own else "global"
    )
    batch = {"x": X, "y": Y, "weights": WEIGHTS}
    if own:
        batch = {name: each.chunk(2)[rank] for name, each in batch.items()}
    state, metrics = train(train.init(W), **batch)
    return [metrics.loss, train.params(state)]


@pytest.mark.parametrize("own", [False, True])
def test_keywords_on_processes(own: bool) -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), MESH, fp.zero(1, "data"), reduction="ordered")
    state, metrics = train(train.init(W), X, Y, WEIGHTS)
    for found, params in run_on_processes(keyed_on_a_rank, 2, own):
        assert torch.equal(found, metrics.loss) and torch.equal(params, train.params(state))


class Encoding(UserDict[str, Any]):
    """Like a tokenizer's BatchEncoding: a mapping with attributes, which is no dict."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def of_encoding(w: torch.Tensor, batch: Encoding) -> torch.Tensor:
    return loss(w, batch.x, batch["y"], **{name: batch[name] for name in batch if name == "weights"})


@pytest.mark.parametrize("specs", [None, P("data"), {"x": P("data"), "y": P("data"), "weights": P("data")}])
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_batch_that_is_a_user_dict(specs: Any, accumulated: bool) -> None:
    """It was refused as no pytree."""
    plan = fp.zero(1, "data", batch=specs and (specs,))
    plan = fp.chain(plan, fp.accumulate(2)) if accumulated else plan
    train = fp.train_step(of_encoding, fp.optim.sgd(0.1), MESH, plan)
    batch = Encoding({"y": Y, "x": X, "weights": WEIGHTS}, encodings=[object()])
    _, metrics = train(train.init(W), batch)
    torch.testing.assert_close(metrics.loss, loss(W, X, Y, WEIGHTS))
    _, metrics = train(train.init(W), Encoding({"x": X, "y": Y + 1, "weights": WEIGHTS}))
    torch.testing.assert_close(metrics.loss, loss(W, X, Y + 1, WEIGHTS))


def test_keywords_of_a_prepared_step() -> None:
    net = torch.nn.Linear(4, 1)
    step = fp.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loss=of_model, mesh=MESH)
    batch = {"x": X, "y": Y}
    wanted = of_model(net, **batch).detach()
    torch.testing.assert_close(step.eval(of_model)(**Encoding(batch)), wanted)
    torch.testing.assert_close(step(**Encoding(batch)), wanted)


def of_model(model: Callable[..., torch.Tensor], *, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - y).square().mean()


def test_names_that_have_no_place() -> None:
    step = fp.compile(fp.data_parallel("data")(loss), MESH)
    with pytest.raises(TypeError, match=r"loss\(w: .*\) .*: got an unexpected keyword argument 'mask'"):
        step(W, X, Y, mask=WEIGHTS)
    bound = fp.compile(fp.data_parallel("data")(partial(loss, power=3)), MESH)
    assert bound(W, X, Y) == loss(W, X, Y, power=3)
    torch.testing.assert_close(bound(W, X, Y, power=2), loss(W, X, Y))
    silent = fp.compile(fp.data_parallel("data")(max), MESH)
    with pytest.raises(TypeError, match="max does not say what its arguments are called: give 'key' by place"):
        silent(X, key=len)
