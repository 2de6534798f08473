"""An optimizer of a user's own, written for whole parameters, does the same to them however they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

Update = Callable[[Any, Any, Any], tuple[Any, Any]]

TENSOR = fp.tensor_parallel("tensor", {"first": P(None, "tensor"), "bias": P("tensor"), "second": P("tensor")})
STACKS = {"first": P(), "bias": P(), "second": P(), "layers/*": P("pipe")}

PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 2, filled up": (fp.zero(2, "data"), Mesh(data=4)),  # no dim of `first` and `second` divides by 4
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "zero 3, filled up": (fp.zero(3, "data"), Mesh(data=4)),
    "tensor": (TENSOR, Mesh(tensor=2)),
    "tensor, zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
    "replicas, shards": (fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica")), Mesh(replica=2, shard=2)),
    "pipeline, zero 1": (fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
}


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (5, 6), "bias": (6,), "second": (6, 3)}
    return {name: torch.randn(shape, generator=generator).double() / 2 for name, shape in shapes.items()}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def loss(params: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(x @ params["first"] + params["bias"]) @ params["second"], labels)


def with_momentum(step: Callable[[Tensor, Tensor], Tensor]) -> fp.optim.Optimizer:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        momentum = optree.tree_map(lambda m, g: 0.9 * m + g, state, grads)
        return optree.tree_map(step, params, momentum), momentum

    return fp.optim.Optimizer(lambda params: optree.tree_map(torch.zeros_like, params), update)


def muon(p: Tensor, m: Tensor) -> Tensor:
    if m.ndim < 2:
        return p - 0.1 * m
    x = m / (m.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return p - 0.1 * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * x


def lamb(p: Tensor, m: Tensor) -> Tensor:
    return p - 0.1 * p.norm() / (m.norm() + 1e-6) * m


def centred(p: Tensor, m: Tensor) -> Tensor:
    return p - 0.1 * (m - m.mean(0, keepdim=True))


def by_shape(p: Tensor, m: Tensor) -> Tensor:
    return p - 0.1 * m.sign() / p.shape[0]


def shampoo() -> fp.optim.Optimizer:
    """Its matrices are in trees like the parameters', of other shapes than those."""

    def init(params: Any) -> Any:
        squares = optree.tree_map(lambda p: torch.eye(len(p), dtype=p.dtype), params)
        return {"left": squares, "updates": optree.tree_map(lambda p: torch.zeros((), dtype=torch.int64), params)}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        left = optree.tree_map(lambda m, g: m + g.reshape(len(g), -1) @ g.reshape(len(g), -1).mT, state["left"], grads)
        count = optree.tree_map(lambda n: n + 1, state["updates"])
        new = optree.tree_map(
            lambda p, g, m, n: p - 0.1 / n * torch.linalg.solve(m, g.reshape(len(g), -1)).reshape(g.shape),
            *(params, grads, left, count),
        )
        return new, {"left": left, "updates": count}

    return fp.optim.Optimizer(init, update)


def bounded() -> fp.optim.Optimizer:
    """What it does to one parameter depends on all gradients."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        norm = torch.stack([g.square().sum() for g in optree.tree_leaves(grads)]).sum().sqrt()
        return optree.tree_map(lambda p, g: p - 0.1 * g / norm, params, grads), state

    return fp.optim.Optimizer(lambda params: (), update)


def on_whole_parameters(optimizer: fp.optim.Optimizer, f: Callable[..., Tensor], params: Any, steps: int = 3) -> Any:
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = optimizer.update(torch.func.grad(f)(params, *batch()), state, params)
    return params, state


OPTIMIZERS = {
    "muon": with_momentum(muon),
    "lamb": with_momentum(lamb),
    "centred": with_momentum(centred),
    "by shape": with_momentum(by_shape),
    "shampoo": shampoo(),
    "bounded": bounded(),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.every(5)
def test_an_update_is_that_of_whole_parameters(name: str, plan: str) -> None:
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, OPTIMIZERS[name], mesh, transform)
    state = train.init(parameters())
    for _ in range(3):
        state, _ = train(state, *batch())
    wanted = on_whole_parameters(OPTIMIZERS[name], loss, parameters())
    for found, right in zip(optree.tree_leaves(train.whole(state)), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("plan", "declared"), [
    ("zero 1", False), ("zero 1", True), ("zero 2, filled up", True), ("tensor, zero 3", True),
])  # fmt: skip
def test_one_that_is_elementwise_sends_nothing_of_its_own(plan: str, declared: bool) -> None:
    transform, mesh = PLANS[plan]
    momentum = with_momentum(lambda p, m: p - torch.where(m.abs() > 0.1, 0.1 * m, 0.01 * m.sign()))
    counts = []
    for optimizer in (momentum._replace(elementwise=declared), fp.optim.sgd(0.1, momentum=0.9)):
        train = fp.train_step(loss, optimizer, mesh, transform)
        counts.append(train.lower(parameters(), *batch()).counts())
    assert counts[0] == counts[1]


def deep() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    layers = {"w": torch.randn(4, 6, 6, generator=generator).double() / 3, "b": torch.zeros(4, 6).double()}
    return {**parameters(), "layers": layers}


def deep_loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
    h = torch.tanh(x @ params["first"] + params["bias"])
    for w, b in zip(params["layers"]["w"], params["layers"]["b"], strict=True):
        h = torch.tanh(h @ w + b)
    return F.cross_entropy(h @ params["second"], labels)


def test_stacked_layers_of_a_pipeline_are_updated_one_by_one_where_that_is_the_same() -> None:
    optimizer = with_momentum(lambda p, m: p - 0.1 * m.sign())._replace(elementwise=True)
    train = fp.train_step(deep_loss, optimizer, Mesh(pipe=2), fp.pipeline("pipe", STACKS, microbatches=2))
    state = train.init(deep())
    for _ in range(3):
        state, _ = train(state, *batch())
    wanted, _ = on_whole_parameters(optimizer, deep_loss, deep())
    for found, right in zip(optree.tree_leaves(train.params(state)), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "step", [lamb, lambda p, m: p - 0.1 * m * (1 if p.ndim > 1 else 2)], ids=["a norm", "by the number of dims"]
)
def test_stacked_layers_of_a_pipeline_are_refused_where_it_is_not(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    plan = fp.pipeline("pipe", STACKS, microbatches=2)
    for declared, why in {
        False: "it does not declare it",
        True: "given one layer of each stack, it returns another",
    }.items():
        optimizer = with_momentum(step)._replace(elementwise=declared)
        train = fp.train_step(deep_loss, optimizer, Mesh(pipe=2), plan)
        with pytest.raises(ValueError, match=rf"layers/b is a stack of layers.*not elementwise \({why}"):
            train.init(deep())


def returning(change: Callable[[Any, Any], Any]) -> fp.optim.Optimizer:
    """One that counts its steps, and returns what is made of its parameters and its state."""
    init = lambda params: {"steps": torch.zeros((), dtype=torch.int64), "calls": 0}  # noqa: E731
    return fp.optim.Optimizer(init, lambda grads, state, params: change(params, state))


UNLIKE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a number": (
        lambda p, s: (p, {**s, "calls": s["calls"] + 1}),
        r"state/calls: given as 0, returned as 1; .*torch.tensor",
    ),
    "a dtype": (
        lambda p, s: (p, {**s, "steps": s["steps"] + 0.5}),
        r"state/steps: given as \(\) int64, returned as \(\) float",
    ),
    "a shape": (
        lambda p, s: (p, {**s, "steps": s["steps"][None]}),
        r"state/steps: given as \(\) int64, returned as \(1,\)",
    ),
    "a tree": (lambda p, s: (p, {"steps": s["steps"]}), r"state: given as \{'calls': \*, 'steps': \*\}, returned as"),
    "a parameter": (
        lambda p, s: ({**p, "bias": p["bias"].float()}, s),
        r"parameters/bias: given as .* returned as .*float32",
    ),
    "no pair": (lambda p, s: p, "returned a dict; it returns"),
}


@pytest.mark.parametrize("bound", [False, True], ids=["elementwise", "partitioned"])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_an_update_returns_is_like_what_it_was_given(name: str, bound: bool) -> None:
    """A number that Python counts would stay as it is: the step that was traced has it as a constant."""
    change, message = UNLIKE[name]

    def changed(params: Any, state: Any) -> Any:
        factor = (1 / params["first"].norm()).detach() if bound else 1
        return change({key: p * factor for key, p in params.items()}, state)

    train = fp.train_step(loss, returning(changed), Mesh(data=2), fp.zero(1, "data"))
    with pytest.raises((ValueError, TypeError), match=message):
        train(train.init(parameters()), *batch())
