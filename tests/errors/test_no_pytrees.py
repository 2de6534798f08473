"""What is no pytree of tensors is refused by name, where it would be a constant of the program."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .test_bad_input import message


class Record:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "wrap",
    [
        torch.Tensor.numpy,
        lambda x: collections.ChainMap({"x": x}),
        lambda x: collections.ChainMap({"nested": collections.ChainMap({"x": [x]})}),
        Record,
        Slotted,
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_that_is_no_pytree_of_tensors(wrap: Callable[[torch.Tensor], Any], trained: bool) -> None:
    """Every later batch that prints alike was taken for the first."""

    def of_batch(w: torch.Tensor, batch: Any) -> torch.Tensor:
        found = batch[0]
        while not isinstance(found, torch.Tensor):
            found = torch.as_tensor(found) if hasattr(found, "shape") else getattr(found, "x", None) or found["x"]
        return (found @ w).sum()

    plan, batch = fp.data_parallel("data"), [wrap(torch.ones(8, 4)), 2.0, np.float32(1)]
    train = fp.train_step(of_batch, fp.optim.sgd(0.1), Mesh(data=2), plan)
    run = partial(train, train.init(torch.ones(4))) if trained else partial(fp.compile(plan(of_batch), Mesh(data=2)), 0)
    said = message(lambda: run(batch), TypeError)
    assert f"  {'1/0/0' if trained else '1/0'}: " in said and "1/1" not in said
    assert "a constant of the program" in said and "torch.as_tensor(array)" in said and "dict(batch)" in said


def test_a_parameter_that_is_an_array() -> None:
    """It was never trained."""
    train = fp.train_step(lambda p, x: (x @ torch.as_tensor(p["w"]) + p["b"]).sum(), fp.optim.sgd(0.1), Mesh(data=2))
    state = train.init({"w": np.ones(4, np.float32), "b": torch.ones(1)})
    assert "0/0/w: an array, numpy.ndarray of shape (4,)" in message(lambda: train(state, torch.ones(8, 4)), TypeError)


def test_a_result_that_is_no_pytree_of_tensors() -> None:
    plan = fp.data_parallel("data")
    step = fp.compile(plan(lambda w, x: {"record": Record(x @ w)}), Mesh(data=2))
    assert "results" in (said := message(lambda: step(torch.ones(4), torch.ones(8, 4)), TypeError))
    assert "  record: " in said and "Record, which is no pytree and holds tensors" in said


@pytest.mark.parametrize("trained", [False, True])
def test_a_train_state_as_an_argument(trained: bool) -> None:
    """As to evaluate it, or another model's in an adversarial game."""
    plan, ones = fp.data_parallel("data"), torch.ones(4)
    train = fp.train_step(lambda w, other, x: (x @ w).sum(), fp.optim.sgd(0.1), Mesh(data=2), plan)
    evaluate = fp.compile(plan(lambda w, x: (x @ w).sum()), Mesh(data=2))
    state, other = train.init(ones), train.init(ones)
    run = partial(train, state, other) if trained else partial(evaluate, other)
    said = message(lambda: run(torch.ones(8, 4)), TypeError)
    assert f"  {'1/0' if trained else '0'}: functional_parallel.training.train_state.TrainState, in whose place" in said
    assert "train.params(state)" in said
