"""A training step takes the states that are its own, of any parameters, and refuses others before it computes."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

DATA = Mesh(data=2)
OPTIMIZERS = {
    "sgd": fp.optim.sgd(0.5),
    "momentum": fp.optim.sgd(0.5, momentum=0.5),
    "adamw": fp.optim.adamw(0.5),
    "lion": fp.optim.lion(0.5),
    "adafactor": fp.optim.adafactor(0.5),
}
PLANS = {
    "data": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "flat": fp.zero(1, "data", layout="flat"),
    "zero 3": fp.zero(3, "data"),
}
X = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 8


def loss(params: Any, x: Tensor) -> Tensor:
    return sum((x @ w).square().mean() for w in optree.tree_leaves(params))  # type: ignore[return-value]


def step(optimizer: str = "adamw", plan: str = "data", **options: Any) -> Any:
    return fp.train_step(loss, OPTIMIZERS[optimizer], DATA, PLANS[plan], **options)


def weights(*columns: int) -> dict[str, Tensor]:
    return {f"w{number}": torch.ones(4, size, dtype=torch.float64) for number, size in enumerate(columns)}


# -----------------------------------------------------------------------------
# An optimizer's state is one of the parameters beside it
# -----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["data", "zero 1", "zero 3"]),
)
def test_a_state_is_loaded_with_its_own_parameters_alone(
    columns: list[int], others: list[int], optimizer: str, other: str, plan: str
) -> None:
    saved = OPTIMIZERS[other].init(weights(*others))
    fits = optree.tree_map(_look, OPTIMIZERS[optimizer].init(weights(*columns))) == optree.tree_map(_look, saved)
    train = step(optimizer, plan)
    if fits and type(saved) is type(OPTIMIZERS[optimizer].init(weights(1))):
        train(train.load(weights(*columns), saved, 3), X)
    else:
        with pytest.raises(ValueError, match="does not belong to these parameters"):
            train.load(weights(*columns), saved, 3)


def _look(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def test_a_state_of_other_shapes_is_refused_by_path() -> None:
    saved = OPTIMIZERS["adamw"].init(weights(2))
    with pytest.raises(ValueError) as caught:
        step().load(weights(64), saved, 0)
    said = str(caught.value)
    assert "optimizer_state.mean['w0']: (4, 2) float64; the optimizer keeps (4, 64) float64" in said
    assert "optimizer_state.square['w0']" in said and "one `train.whole(state)`" in said and "train.init" in said


def test_a_state_of_another_dtype_is_refused() -> None:
    saved = OPTIMIZERS["adamw"].init(optree.tree_map(Tensor.float, weights(2)))
    with pytest.raises(ValueError, match=r"mean\['w0'\]: \(4, 2\) float32; the optimizer keeps \(4, 2\) float64"):
        step().load(weights(2), saved, 0)


def test_a_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(AdamWState\) does not belong .* keeps SGDState"):
        step("momentum").load(weights(2), OPTIMIZERS["adamw"].init(weights(2)), 0)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"mean\['w1'\]: missing; the optimizer keeps \(4, 3\) float64"):
        step().load(weights(2, 3), OPTIMIZERS["adamw"].init(weights(2)), 0)


def test_stacks_of_layers_are_compared_as_the_user_has_them() -> None:
    def stacked(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params["w"]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    plan = fp.pipeline("pipe", {"w": P("pipe")}, microbatches=2)
    train = fp.train_step(stacked, OPTIMIZERS["adamw"], Mesh(pipe=2), plan)
    params = {"w": torch.ones(2, 4, 4, dtype=torch.float64)}
    saved = train.whole(train.init(params))
    train(train.load(*saved, 0), X)
    other = OPTIMIZERS["adamw"].init({"w": torch.ones(2, 4, 5, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"mean\['w'\]: \(2, 4, 5\) float64; the optimizer keeps \(2, 4, 4\)"):
        train.load(params, other, 0)
