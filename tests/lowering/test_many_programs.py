"""A function that is traced for call after call says why: each of its programs takes time, and is kept."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.tracing import assumptions
from sharding_specs import Mesh

MANY = 5


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer are many here."""
    assert assumptions._MANY == 32
    monkeypatch.setattr(assumptions, "_MANY", MANY)


def loss(w: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (x @ w).square().mean() * scale


def test_a_number_that_changes_from_step_to_step() -> None:
    train = fp.train_step(loss, fp.optim.sgd(1e-9), Mesh(data=1), fp.data_parallel("data"))
    state, _ = train(train.init(torch.ones(2)), torch.ones(4, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(2 * MANY):
            state, _ = train(state, torch.ones(4, 2), float(index))
    assert [Path(each.filename) for each in caught] == [Path(__file__)] * 2, "with 5 programs, and with 10"
    first, second = (str(each.message) for each in caught)
    assert first.startswith(
        f"train_step of loss has traced {MANY} programs, and traces another: 1 is {MANY - 1}.0 after {MANY - 2}.0. "
    )
    assert second.startswith(
        f"train_step of loss has traced {2 * MANY} programs, and traces another: 1 is 9.0 after 8.0. "
    )
    assert "Pass numbers as tensors" in first


@pytest.mark.parametrize("grows", ["rows", "tree"])
def test_shapes_and_trees_that_change_from_call_to_call(grows: str) -> None:
    def total(tree: Any) -> torch.Tensor:
        return sum(leaf.sum() for leaf in tree)  # type: ignore[return-value]

    step = fp.compile(fp.data_parallel("data")(lambda _, tree: total(tree)), Mesh(data=1))

    def call(number: int) -> None:
        step((), [torch.ones(number, 2)] if grows == "rows" else [torch.ones(1)] * number)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.errors.RestagingWarning)
        for number in range(1, MANY + 1):
            call(number)
            call(number)
    told = (
        r"1/0 is float32\[6, 2\] after float32\[5, 2\]" if grows == "rows" else "its arguments have another structure"
    )
    with pytest.warns(RuntimeWarning, match=told):
        call(MANY + 1)
