"""What a training step may be given: a batch of any tree, arguments that lie each in its own way, odd parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError

from ..trees import assert_close, assert_equal
from .test_train_step import PLANS, batches, loss, parameters, run


def test_a_batch_may_be_any_pytree() -> None:
    def of_tree(params: Any, batch: dict[str, Any]) -> Tensor:
        return loss(params, batch["x"], batch["targets"][0]) * batch["weight"]

    x, labels = batches()[0]
    train = fp.train_step(of_tree, fp.optim.sgd(0.1), Mesh(data=2), fp.data_parallel("data"))
    _, metrics = train(train.init(parameters()), {"x": x, "targets": [labels], "weight": 2.0})
    assert_close(metrics.loss, 2 * loss(parameters(), x, labels))


CUT = (P("microbatch"), P("microbatch"), P())
SPLIT = (P("data"), P("data"), P())


@pytest.mark.parametrize(
    "plan",
    [
        fp.data_parallel("data", batch=SPLIT),
        fp.zero(1, "data", batch=SPLIT),
        fp.zero(1, "data", layout="flat", batch=SPLIT),
        fp.zero(3, "data", batch=SPLIT),
        fp.chain(fp.zero(2, "data", batch=SPLIT), fp.accumulate(2, batch=CUT)),
        fp.chain(fp.data_parallel("data", batch=SPLIT), fp.pipeline("pipe", microbatches=2, batch=CUT)),
    ],
    ids=repr,
)
def test_arguments_of_the_batch_may_lie_each_in_its_own_way(plan: Any) -> None:
    def weighted(params: Any, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        return loss(params, x, labels) * scales.sum()

    scales, (x, labels) = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64), batches()[0]  # 3: no axis divides it
    results = []
    for place, mesh in ((None, Mesh(data=1)), (plan, Mesh(pipe=2, data=2) if "pipe" in repr(plan) else Mesh(data=2))):
        train = fp.train_step(weighted, fp.optim.sgd(0.1), mesh, place)
        state, metrics = train(train.init(parameters()), x, labels, scales)
        results.append((train.params(state), metrics.loss, metrics.grad_norm))
    assert_close(results[1], results[0])
    with pytest.raises(
        SpecError, match=r"specs for 3 arguments after the parameters, but the function .* with 2; give"
    ):
        train(state, x, labels)


def test_parameters_that_ranks_do_not_divide_are_all_named() -> None:
    plan = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})
    train = fp.train_step(lambda p, x: (x @ p["w"] @ p["v"]).sum(), fp.optim.sgd(0.1), Mesh(tensor=2), plan)
    params = {"w": torch.ones(3, 5), "v": torch.ones(5)}
    for begin in (train.init, lambda params: train.load(params, fp.optim.sgd(0.1).init(params), 0)):
        with pytest.raises(SpecError, match=r"(?s)v: shape \(5,\).* make it 6, .*w: shape \(3, 5\)"):
            begin(params)


def test_parameters_that_are_not_floating_tensors_stay() -> None:
    def of_table(params: Any, x: Tensor) -> Tensor:
        return ((x @ params["w"])[:, params["order"]] * torch.arange(3.0) * params["factor"]).sum()

    params = {"w": torch.ones(4, 3), "order": torch.tensor([2, 0, 1]), "factor": 2}
    x = torch.arange(8.0).reshape(2, 4)
    train = fp.train_step(of_table, fp.optim.adamw(0.1), Mesh(data=2), fp.data_parallel("data"))
    state, metrics = train(train.init(params), x)
    assert metrics.loss == of_table(params, x)
    new = train.params(state)
    assert torch.equal(new["order"], params["order"]) and new["factor"] == 2 and not torch.equal(new["w"], params["w"])


WITH_NONE = {
    **PLANS,
    "flat": (fp.zero(1, "data", layout="flat"), Mesh(data=2)),
    "pipe": (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
}


@pytest.mark.parametrize("plan", WITH_NONE)
@pytest.mark.parametrize("optimizer", [fp.optim.sgd(0.2, momentum=0.9), fp.optim.adamw(0.1), fp.optim.lion(0.1)])
@pytest.mark.every(3)
def test_a_parameter_that_is_none_changes_nothing(plan: str, optimizer: Any) -> None:
    """As `bias=None` in a layer."""
    transform, mesh = WITH_NONE[plan]
    train, without = (fp.train_step(loss, optimizer, mesh, transform, clip=0.3) for _ in range(2))
    params = {**parameters(), "third": {"w": None, "b": [None]}}
    losses, norms, state = run(train, train.init(params), batches(2))
    want_losses, want_norms, want = run(without, without.init(parameters()), batches(2))
    assert (losses, norms) == (want_losses, want_norms)
    assert_equal(train.params(state), {**without.params(want), "third": {"w": None, "b": [None]}})
    train(train.load(*train.whole(state), 2), *batches()[0])
