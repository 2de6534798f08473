"""Chains of gradient transformations: the optimizers to the bit, torch's AdamW under every ZeRO, a user's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.optim import (
    Transformation,
    add_decayed_weights,
    chain,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    schedules,
    trace,
)
from sharding_specs import Mesh, P

from ..trees import assert_close
from .test_optimizers import parameters, run, run_torch

RATE = schedules.cosine(0.1, 20, warmup=3)
DECAY = {"layers/*": False}
BETAS = (0.8, 0.95)

SAME: dict[str, tuple[fp.optim.Optimizer, fp.optim.Optimizer]] = {
    "adamw": (
        fp.optim.adamw(RATE, betas=BETAS, eps=1e-6, weight_decay=0.3, decay=DECAY),
        chain(scale_by_adam(betas=BETAS, eps=1e-6), add_decayed_weights(0.3, DECAY), scale_by_learning_rate(RATE)),
    ),
    "adam": (
        fp.optim.adam(RATE, betas=BETAS, weight_decay=0.3, decay=DECAY),
        chain(add_decayed_weights(0.3, DECAY), scale_by_adam(betas=BETAS), scale_by_learning_rate(RATE)),
    ),
    "adam without decay": (fp.optim.adam(0.1), chain(scale_by_adam(), scale_by_learning_rate(0.1))),
    "lion": (
        fp.optim.lion(RATE, betas=BETAS, weight_decay=0.3, decay=DECAY),
        chain(scale_by_lion(betas=BETAS), add_decayed_weights(0.3, DECAY), scale_by_learning_rate(RATE)),
    ),
    "nesterov": (
        fp.optim.sgd(RATE, momentum=0.8, nesterov=True, weight_decay=0.3, decay=DECAY),
        chain(add_decayed_weights(0.3, DECAY), trace(0.8, nesterov=True), scale_by_learning_rate(RATE)),
    ),
    "dampening": (
        fp.optim.sgd(RATE, momentum=0.8, dampening=0.5),
        chain(trace(0.8, dampening=0.5), scale_by_learning_rate(RATE)),
    ),
    "descent": (fp.optim.sgd(RATE), chain(scale_by_learning_rate(RATE))),
}


def everywhere(params: Any) -> int:
    return 0


#: changes nothing; between the decay and the rate, so that no op is fused
IDENTITY = Transformation(lambda step: lambda update, parameter: update)
ADAMW = chain(scale_by_adam(), add_decayed_weights(0.1), scale_by_learning_rate(0.02))
APART = chain(scale_by_adam(), add_decayed_weights(0.1), IDENTITY, scale_by_learning_rate(0.02))


def torchs_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.02, weight_decay=0.1)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a_chain_is_the_optimizer_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Parameters, moments and the number of updates."""
    wanted, composed = SAME[name]
    ours, theirs = (optree.tree_leaves(run(each, parameters(dtype))) for each in (composed, wanted))
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("optimizer", [ADAMW, APART], ids=["fused", "apart"])
def test_ten_steps_equal_torchs(optimizer: fp.optim.Optimizer) -> None:
    """Apart, the decay is added to the update before the rate multiplies both: the same but for rounding."""
    assert_close(run(optimizer, parameters())[0], run_torch(torchs_adamw, parameters()))


def test_the_moments_of_adam_do_not_depend_on_what_follows() -> None:
    alone = run(chain(scale_by_adam(), IDENTITY), parameters(), 1)[1]
    fused = run(ADAMW, parameters(), 1)[1]
    assert all(map(torch.equal, optree.tree_leaves(alone), optree.tree_leaves(fused)))


def test_a_transformation_in_the_middle_may_scale_by_a_rate() -> None:
    """`scale_by_learning_rate` need not be last."""
    optimizer = chain(scale_by_learning_rate(0.5), Transformation(lambda step: lambda update, _: 2 * update))
    assert optimizer.update(torch.ones(1), optimizer.init(torch.ones(1)), torch.ones(1))[0].item() == 0.0


# -----------------------------------------------------------------------------
# Training
# -----------------------------------------------------------------------------


def loss(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ params["w"] + params["b"]) @ params["v"]).square().mean()


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 8), "b": (8,), "v": (8, 6)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(5)]

TENSOR = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "b": P("tensor"), "v": P("tensor")})
PLANS: dict[str, tuple[Any, Mesh]] = {
    **{f"zero {stage}": (fp.zero(stage, "data"), Mesh(data=2)) for stage in range(4)},
    "flat": (fp.zero(1, "data", layout="flat"), Mesh(data=2)),
    "tensor, zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
}


def trained(optimizer: fp.optim.Optimizer, plan: str | None) -> tuple[Any, Any]:
    transform, mesh = PLANS[plan] if plan else (None, Mesh())
    train = fp.train_step(loss, optimizer, mesh, transform)
    state = train.init(weights())
    for batch in BATCHES:
        state, _ = train(state, batch)
    return train.whole(state)


@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_torchs_adamw(plan: str) -> None:
    leaves = {name: leaf.requires_grad_() for name, leaf in weights().items()}
    optimizer = torchs_adamw(leaves.values())
    for batch in BATCHES:
        optimizer.zero_grad()
        loss(leaves, batch).backward()
        optimizer.step()
    assert_close(trained(ADAMW, plan)[0], {name: leaf.detach() for name, leaf in leaves.items()})


def with_decays(promises: bool) -> fp.optim.Optimizer:
    """Two transformations with constants, and a user's own, which scales each parameter by its own number."""
    own = Transformation(
        lambda step: lambda update, parameter, factor: update.clamp(-1.0, 1.0) * factor,
        constants=lambda params: {"w": 0.5, "b": 1.0, "v": 2.0},
    )
    unknown = Transformation(lambda step: lambda update, parameter, m: (update + 0.5 * m, update + 0.5 * m), 1)
    decays = (add_decayed_weights(0.1, {"b": False}), trace(0.5), own, add_decayed_weights(0.2, {"v": 0.5}))
    return chain(*decays, *([] if promises else [unknown]), scale_by_learning_rate(0.1))


@pytest.mark.parametrize(
    ("promises", "plan"), [(True, plan) for plan in PLANS] + [(False, "zero 1"), (False, "zero 3")]
)
def test_constants_of_several_transformations(promises: bool, plan: str) -> None:
    optimizer = with_decays(promises)
    assert (optimizer.constants is not None) == promises
    assert_close(trained(optimizer, plan), trained(optimizer, None))


def orthogonal(step: Tensor) -> Callable[..., Tensor]:
    """Muon's iteration, which is not elementwise."""

    def one(update: Tensor, parameter: Tensor, *constant: Any) -> Tensor:
        if update.ndim != 2:
            return update
        x = update / update.norm()
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x

    return one


@pytest.mark.parametrize("plan", ["zero 1", "zero 3", "tensor, zero 3"])
def test_a_transformation_that_is_not_elementwise_is_partitioned(plan: str) -> None:
    muon = chain(trace(0.9), Transformation(orthogonal), scale_by_learning_rate(0.02))
    assert_close(trained(muon, plan), trained(muon, None))


@pytest.mark.parametrize("plan", ["zero 1", "flat"])
def test_a_promise_to_be_elementwise_is_checked(plan: str) -> None:
    muon = chain(Transformation(orthogonal, constants=everywhere), scale_by_learning_rate(0.02))
    with pytest.raises(ValueError, match=r"declares by .* that its update is elementwise, and it is not"):
        trained(muon, plan)


def test_a_saved_state_continues() -> None:
    train = fp.train_step(loss, ADAMW, Mesh(data=2), fp.zero(2, "data"))
    state = train.init(weights())
    for batch in BATCHES[:3]:
        state, _ = train(state, batch)
    file = io.BytesIO()
    torch.save(train.whole(state), file)
    file.seek(0)
    other = fp.train_step(loss, ADAMW, Mesh(data=2), fp.zero(1, "data", layout="flat"))
    state = other.load(*torch.load(file), 3)
    for batch in BATCHES[3:]:
        state, _ = other(state, batch)
    assert_close(other.whole(state), trained(ADAMW, "zero 3"))


def test_a_parameter_that_the_loss_does_not_use_stays() -> None:
    params = {**weights(), "idle": torch.ones(4, dtype=torch.float64)}
    for optimizer in (ADAMW, APART):
        train = fp.train_step(loss, optimizer, Mesh(data=2), fp.zero(2, "data"))
        with pytest.warns(fp.NotTrainedWarning, match="idle"):
            state, _ = train(train.init(params), BATCHES[0])
        assert torch.equal(train.params(state)["idle"], params["idle"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: scale_by_adam(betas=(0.9, 1.0)), r"scale_by_adam\(betas="),
        (lambda: scale_by_adam(eps=-1.0), r"scale_by_adam\(eps=-1\.0"),
        (lambda: scale_by_lion(betas=(0.9,)), r"scale_by_lion\(betas="),  # type: ignore[arg-type]
        (lambda: trace(-0.1), r"trace\(momentum=-0\.1"),
        (lambda: trace(0.9, dampening=0.5, nesterov=True), r"trace\(nesterov=True\) needs"),
        (lambda: add_decayed_weights(-1.0), r"add_decayed_weights\(weight_decay=-1\.0"),
        (lambda: scale_by_learning_rate(-0.1), r"scale_by_learning_rate\(lr=-0\.1"),
        (lambda: chain(fp.optim.adamw(0.1)), r"chain takes transformations, .* not Optimizer\(adamw\)"),
        (lambda: chain(add_decayed_weights(0.1, {"*/bais": 0})).init(parameters()), r"'\*/bais'"),
    ],
)
def test_what_is_out_of_range_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make()
