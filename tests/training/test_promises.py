"""An optimizer that promises by `constants` to be elementwise keeps its promise, or is refused where it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..some_cases import one_in
from .test_own_optimizers import (
    OPTIMIZERS,
    PLANS,
    STACKS,
    TENSOR,
    batch,
    deep,
    deep_loss,
    loss,
    on_whole_parameters,
    parameters,
    with_momentum,
)

FLAT: dict[str, tuple[Any, Mesh]] = {
    "flat": (fp.zero(1, "data", layout="flat"), Mesh(data=2)),
    "flat, tensor": (fp.chain(TENSOR, fp.zero(2, "data", layout="flat")), Mesh(data=2, tensor=2)),
}
WITH_FLAT = {**PLANS, **FLAT}
SPLITTING = ["zero 1", "zero 3, filled up", "tensor", "tensor, zero 3", "pipeline, zero 1", *FLAT]


def promising(optimizer: fp.optim.Optimizer) -> fp.optim.Optimizer:
    def update(grads: Any, state: Any, params: Any, constants: Any) -> Any:
        return optimizer.update(grads, state, params)

    return fp.optim.Optimizer(optimizer.init, update, constants=lambda params: 0)


def of_all(step: Callable[[list[Tensor], list[Tensor]], Any]) -> fp.optim.Optimizer:
    def update(grads: Any, state: Any, params: Any) -> Any:
        leaves, tree = optree.tree_flatten(params)
        return tree.unflatten(step(leaves, optree.tree_leaves(grads))), state

    return fp.optim.Optimizer(lambda params: (), update)


def by_path(grads: Any, state: Any, params: Any) -> Any:
    rate = lambda path: 0.2 if "bias" in path else 0.1  # noqa: E731
    return optree.tree_map_with_path(lambda path, p, g: p - rate(path) * g, params, grads), state


def in_place(p: Tensor, m: Tensor) -> Tensor:
    return p.clone().addcmul_(m, m.sign(), value=-0.1).clamp_(min=-5)


def foreach(params: list[Tensor], grads: list[Tensor]) -> Any:
    torch._foreach_mul_(scaled := torch._foreach_add(grads, params, alpha=0.01), 0.1)
    return torch._foreach_sub(params, scaled)


KEPT = {
    "sign": with_momentum(lambda p, m: p - 0.1 * torch.where(m.abs() > 0.1, m, m.sign())),
    "in place": with_momentum(in_place),
    "of lists": of_all(foreach),
    "seen as a vector": with_momentum(lambda p, m: (p.reshape(-1) - 0.1 * m.reshape(-1)).reshape(p.shape)),
    "with zeros": with_momentum(lambda p, m: p + torch.zeros(p.shape, dtype=p.dtype) - 0.1 * m),
}
BY_PLACE = {  # right of parameters by themselves, and not of a vector made of several
    "by ndim": with_momentum(lambda p, m: p - 0.1 * m * (1 if p.ndim > 1 else 2)),
    "by path": fp.optim.Optimizer(lambda params: (), by_path),
}
MISMATCHES = ["muon", "lamb", "centred", "bounded", "shampoo", "by shape", "by length", "by size"]
BROKEN = {
    **OPTIMIZERS,
    "by length": with_momentum(lambda p, m: p - 0.1 * m / torch.tensor(float(len(p)))),
    "by size": with_momentum(lambda p, m: p - (0.1 * m if p.numel() == 30 else m.sign())),
}


def train(optimizer: fp.optim.Optimizer, plan: str) -> Any:
    transform, mesh = WITH_FLAT[plan]
    step = fp.train_step(loss, optimizer, mesh, transform)
    state = step.init(parameters())
    for _ in range(3):
        state, _ = step(state, *batch())
    return step.whole(state)


@one_in(5, name=KEPT, plan=SPLITTING)
def test_a_promise_that_is_kept_is_taken(name: str, plan: str) -> None:
    wanted = on_whole_parameters(KEPT[name], loss, parameters())
    for found, right in zip(*map(optree.tree_leaves, (train(promising(KEPT[name]), plan), wanted)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@one_in(5, name=MISMATCHES, plan=SPLITTING)
def test_one_that_is_not_is_refused(name: str, plan: str) -> None:
    if name == "shampoo" and plan in FLAT:
        message = "a state that lies in vectors"
    else:
        message = "declares by .* is elementwise, and it is not: given slices .*, it (returns another|fails)"
    with pytest.raises(ValueError, match=message):
        train(promising(BROKEN[name]), plan)


@one_in(5, name=MISMATCHES, plan=SPLITTING)
def test_one_that_declares_nothing_is_right(name: str, plan: str) -> None:
    if plan in FLAT:
        with pytest.raises(ValueError, match=r"elementwise=True.*layout='dims'"):
            train(BROKEN[name], plan)
        return
    wanted = on_whole_parameters(BROKEN[name], loss, parameters())
    for found, right in zip(*map(optree.tree_leaves, (train(BROKEN[name], plan), wanted)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_where_nothing_is_split_nothing_is_refused() -> None:
    wanted = on_whole_parameters(OPTIMIZERS["lamb"], loss, parameters())
    found = train(promising(OPTIMIZERS["lamb"]), "data")
    for one, right in zip(*map(optree.tree_leaves, (found, wanted)), strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", FLAT)
@pytest.mark.parametrize("name", BY_PLACE)
def test_parameters_in_one_vector_are_treated_alike(name: str, plan: str) -> None:
    with pytest.raises(ValueError, match=r"declares by .* is elementwise, and it is not"):
        train(promising(BY_PLACE[name]), plan)
    train(promising(BY_PLACE[name]), "zero 1")


def pair() -> dict[str, Tensor]:
    return {"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}


def swapped(grads: Any, state: Any, params: Any) -> Any:
    return {"a": params["b"] - grads["b"], "b": params["a"] - grads["a"]}, state


def mixed(grads: Any, state: Any, params: Any) -> Any:
    return {"a": params["a"] * params["b"], "b": params["b"]}, state


BY_SPECS = fp.tensor_parallel("data", {"a": P("data"), "b": P(None, "data")})


@pytest.mark.parametrize("update", [swapped, mixed])
def test_parameters_with_other_layouts_are_right_if_nothing_is_declared(update: Any) -> None:
    f = lambda p: (p["a"] * p["b"]).sum()  # noqa: E731
    step = fp.train_step(f, fp.optim.Optimizer(lambda params: (), update), Mesh(data=2), BY_SPECS)
    state, _ = step(step.init(pair()))
    wanted, _ = update(torch.func.grad(f)(pair()), (), pair())
    assert all(torch.equal(step.params(state)[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("update", [swapped, mixed])
def test_parameters_in_vectors_are_not_read_by_name(update: Any) -> None:
    step = fp.train_step(
        lambda p: (p["a"] * p["b"]).sum(),
        promising(fp.optim.Optimizer(lambda params: (), update)),
        Mesh(data=2),
        FLAT["flat"][0],
    )
    with pytest.raises(ValueError, match=r"and it is not: given slices of all tensors, it fails \(TypeError"):
        step(step.init(pair()))


@pytest.mark.parametrize("name", ["lamb", "by shape"])
def test_layers_of_a_stack_are_not_updated_one_by_one_on_a_false_promise(name: str) -> None:
    plan = fp.pipeline("pipe", STACKS, microbatches=2)
    step = fp.train_step(deep_loss, promising(OPTIMIZERS[name]), Mesh(pipe=2), plan)
    with pytest.raises(
        ValueError,
        match=r"layers/b is a stack of layers.*not elementwise \(given one layer of each stack, it returns another",
    ):
        step.init(deep())


def test_a_promise_is_looked_at_once() -> None:
    calls = []

    def update(grads: Any, state: Any, params: Any, constants: Any) -> Any:
        calls.append(params)
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), state

    optimizer = fp.optim.Optimizer(lambda params: (), update, constants=lambda params: 0)
    step = fp.train_step(loss, optimizer, Mesh(data=2), fp.zero(1, "data"))
    state = step.init(parameters())
    x, labels = batch()
    step.lower(state, x, labels)
    assert len(calls) == 4  # three small ones, and the step's own
    step.lower(state, x[:4], labels[:4])
    assert len(calls) == 5


OURS = {
    "sgd": fp.optim.sgd(0.1),
    "sgd, momentum": fp.optim.sgd(0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, decay={"bias": False}),
    "nesterov": fp.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": fp.optim.adam(0.1, weight_decay=0.1),
    "adamw": fp.optim.adamw(0.1, decay={"bias": False}),
    "lion": fp.optim.lion(0.1, weight_decay=0.1, decay={"bias": False}),
    "clipped": fp.optim.clip_value(fp.optim.adamw(0.1), 0.5),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_keep_it(name: str) -> None:
    fp.testing.assert_elementwise(OURS[name], parameters())


def test_bounds_of_gradients_ask_for_an_unknown_promise() -> None:
    with pytest.raises(ValueError, match="another bias than the slice"):
        train(fp.optim.clip_value(promising(OPTIMIZERS["lamb"]), 0.5), "zero 1")
