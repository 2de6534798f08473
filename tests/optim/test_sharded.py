"""Every optimizer gives the same under every plan, elementwise or not; decay by path, clipping by value."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.optim import Optimizer, schedules
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..trees import assert_close

RATE = schedules.cosine(0.1, 10, warmup=3)
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": fp.optim.adam(RATE, weight_decay=0.1),
    "adamw, matrices decay": fp.optim.adamw(RATE, weight_decay=0.1, decay=lambda path, leaf: leaf.ndim > 1),
    "lion": fp.optim.lion(schedules.linear(0.05, 0.0, 10), weight_decay=0.1, decay={"*/b": False}),
    "adagrad": fp.optim.adagrad(RATE, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "adafactor": fp.optim.adafactor(RATE, weight_decay=0.1),
    "lamb": fp.optim.lamb(RATE, weight_decay=0.1, trust=(0.1, 2.0)),
    "muon, adamw for the rest": fp.optim.by_path(
        {"*/w": fp.optim.muon(RATE, dtype=torch.float64), "*": fp.optim.adamw(0.1)}
    ),
    "adafactor, values clipped": fp.optim.clip_value(fp.optim.adafactor(0.1, decay={"experts": 0.5}), 0.01),
}

OPTIMIZERS |= {
    "momentum by schedule": fp.optim.sgd(0.1, momentum=schedules.linear(0.9, 0.5, 5), nesterov=True),
    "betas by schedule": fp.optim.adamw(RATE, betas=(schedules.linear(0.9, 0.5, 5), lambda n: 0.9 if n < 2 else 0.99)),
    "average of lamb": fp.optim.ema(fp.optim.lamb(RATE), 0.9),
    "average of groups": fp.optim.ema(
        fp.optim.by_path({"*/w": fp.optim.adafactor(RATE), "experts": None, "*": fp.optim.adam(0.1)}),
        schedules.linear(0.5, 0.9, 5),
    ),
}

RULES = {
    "first/w": P(None, "tensor"),
    "first/b": P("tensor"),
    "second/w": P("tensor"),
    "experts": P(None, None, "tensor"),
}
TENSOR = fp.tensor_parallel("tensor", RULES)
BOTH_DIMS = {
    "second/w": P("tensor", "data"),
    "first/w": P(None, ("tensor", "data")),
    "experts": P("data", None, "tensor"),
}
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=4)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=4)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (TENSOR, Mesh(tensor=4)),
    "tensor and zero 1": (fp.chain(TENSOR, fp.zero(1, "data")), Mesh(data=2, tensor=2)),
    "tensor and zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(tensor=2, data=2)),
    "both dims split": (fp.chain(TENSOR, fp.zero(3, "data", BOTH_DIMS)), Mesh(data=2, tensor=2)),
}


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) / 2  # noqa: E731
    return {
        "first": {"w": draw(4, 8), "b": draw(8)},
        "second": {"w": draw(8, 6), "b": draw(3)},
        "experts": draw(4, 6, 4),
        "scale": draw(),
    }


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(10)]


def loss(params: dict[str, Any], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
    hidden = hidden @ params["second"]["w"] * params["second"]["b"].repeat(2)
    mixed = torch.einsum("bk,ekm->bem", hidden, params["experts"])
    penalty = (params["first"]["w"] ** 2).sum() + (params["second"]["b"] ** 2).sum()  # which no batch goes into
    return (mixed.sin() ** 2).mean() * (1 + params["scale"]) + penalty / 8


@cache
def by_hand(name: str) -> Any:
    optimizer, params = OPTIMIZERS[name], parameters()
    state = optimizer.init(params)
    for batch in batches():
        params, state = optimizer.update(fp.grad(loss)(params, batch), state, params)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.every(5)
def test_ten_steps_of_any_plan_are_those_of_one_device(plan: str, name: str) -> None:
    """Parameters and the optimizer's state, whole again."""
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, OPTIMIZERS[name], mesh, transform)
    state = train.init(parameters())
    for batch in batches():
        state, _ = train(state, batch)
    assert_close(train.whole(state), by_hand(name))


def test_adafactor_holds_its_share_of_rows_and_columns() -> None:
    train = fp.train_step(loss, fp.optim.adafactor(0.1), Mesh(data=2), fp.zero(1, "data"))
    state = train.init(parameters())
    _, optimizer_state = train.whole(state)
    held = [tuple(handle[0].shape) for handle in state.handles]
    assert [tuple(leaf.shape) for leaf in optree.tree_leaves(optimizer_state.square["first"]["w"])] == [(4, 1), (1, 8)]
    assert (2, 1) in held and (1, 4) not in held, "the rows of first/w, split as ZeRO-1 splits its first even dim"


def test_each_rank_orthogonalizes_its_share_of_the_matrices() -> None:
    """Four matrices on four ranks: each rank gets one in full, by two exchanges per shape, and none is gathered."""

    def squares(params: list[Tensor], x: Tensor) -> Tensor:
        return sum((((x @ w) ** 2).mean() for w in params), start=torch.zeros(()))

    train = fp.train_step(squares, fp.optim.muon(0.1), Mesh(data=4), fp.zero(3, "data"), bucket=None)
    program = train.lower([torch.ones(8, 6)] * 4, torch.ones(4, 8))
    exchanges = [each for each in program.collectives() if each.kind == "all_to_all"]
    assert [str(each.operand) for each in exchanges] == ["f32[4, 2, 6]", "f32[1, 8, 6]"]


def losses_by_norms_and_matrices(rank: int) -> list[float]:
    groups = {"*/w": fp.optim.muon(0.1, dtype=torch.float64), "*": fp.optim.lamb(0.1)}
    train = fp.train_step(loss, fp.optim.by_path(groups), Mesh(data=2), fp.zero(3, "data"), reduction="ordered")
    state, losses = train.init(parameters()), []
    for batch in batches()[:3]:
        state, metrics = train(state, batch)
        losses.append(metrics.loss.item())
    return losses


def test_lamb_and_muon_train_on_processes_as_on_simulated_ranks() -> None:
    losses = losses_by_norms_and_matrices(0)
    assert run_on_processes(losses_by_norms_and_matrices, 2) == [losses, losses]


def test_adafactor_on_shards_of_unknown_place_is_refused() -> None:
    optimizer = fp.optim.adafactor(0.1)

    @fp.shard_map(Mesh(data=2), in_specs=(P("data"), P("data")), out_specs=P("data"))
    def blind(w: Tensor, g: Tensor) -> Tensor:
        return optimizer.update({"w": g}, optimizer.init({"w": w}), {"w": w})[0]["w"]

    @fp.shard_map(Mesh(data=2), in_specs=(P("data"), P("data")), out_specs=P("data"))
    def told(w: Tensor, g: Tensor) -> Tensor:
        return optimizer.update({"w": g}, optimizer.init({"w": w}), {"w": w}, {"w": P("data")})[0]["w"]

    w, g = parameters()["first"]["w"], torch.randn(4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"over data.*without specs.*which axes split which dim.*adamw"):
        blind(w, g)
    assert_close(told(w, g), optimizer.update({"w": g}, optimizer.init({"w": w}), {"w": w})[0]["w"])


# -----------------------------------------------------------------------------
# Decay by path, clipping by value
# -----------------------------------------------------------------------------

DECAYING: dict[str, Callable[..., Optimizer]] = {
    "sgd": fp.optim.sgd,
    "adam": fp.optim.adam,
    "adamw": fp.optim.adamw,
    "lion": fp.optim.lion,
    "adafactor": fp.optim.adafactor,
    "adagrad": fp.optim.adagrad,
    "lamb": fp.optim.lamb,
}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("decay", [{"*/b": False, "scale": 0}, lambda path, leaf: leaf.ndim > 1], ids=["rules", "test"])
def test_a_spared_parameter_is_as_without_decay(name: str, decay: Any) -> None:
    make, params = DECAYING[name], parameters()
    grads = fp.grad(loss)(params, batches()[0])
    new = {}
    for kind, options in {"all": {}, "none": {"weight_decay": 0.0}, "some": {"decay": decay}}.items():
        optimizer = make(0.1, **{"weight_decay": 0.5, **options})
        new[kind], _ = optimizer.update(grads, optimizer.init(params), params)
    for path in (("first", "w"), ("second", "w")):
        assert torch.equal(new["some"][path[0]][path[1]], new["all"][path[0]][path[1]])
        assert not torch.equal(new["some"][path[0]][path[1]], new["none"][path[0]][path[1]])
    assert torch.equal(new["some"]["scale"], new["none"]["scale"])
    assert torch.equal(new["some"]["first"]["b"], new["none"]["first"]["b"])


@pytest.mark.parametrize("name", DECAYING)
def test_a_pattern_that_finds_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"'\*/bais'.*first/b, first/w"):
        DECAYING[name](0.1, weight_decay=0.5, decay={"*/b": False, "*/bais": False}).init(parameters())


def test_clipped_values_are_torchs() -> None:
    params, grads = parameters(), fp.grad(loss)(parameters(), batches()[0])
    optimizer = fp.optim.clip_value(fp.optim.sgd(1.0), 0.01)
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    leaves = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(params)]
    for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_value_(leaves, 0.01)
    assert_close(optree.tree_leaves(new), [(leaf - leaf.grad).detach() for leaf in leaves])
    assert max(grad.abs().max() for grad in optree.tree_leaves(grads)) > 0.01, "the bound was felt"


def test_a_bound_that_lets_nothing_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        fp.optim.clip_value(fp.optim.sgd(0.1), 0.0)
