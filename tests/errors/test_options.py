"""Options of transforms and training steps that mean nothing, or not what they seem to, are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).mean()


@pytest.mark.parametrize("make", [fp.data_parallel, partial(fp.zero, 3), partial(fp.tensor_parallel, specs={})])
def test_one_transform_over_two_axes(make: Any) -> None:
    with pytest.raises(
        TypeError, match=r"one axis of the mesh, by its name, not \('a', 'b'\); for several fp.chain one"
    ):
        make(("a", "b"))


@pytest.mark.parametrize(
    "wrong", [{"stage": True}, {"whole_below": -1}, {"prefetch": 1.5}, {"prefetch": "1"}], ids=repr
)
def test_numbers_of_zero(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        fp.zero(**{"stage": 3, "axis": "data", **wrong})


def test_two_types_to_compute_in() -> None:
    both = fp.chain(fp.mixed_precision("bf16"), fp.mixed_precision("fp16"))
    with pytest.raises(
        fp.OrderError, match=r"mixed_precision\('fp16'\) around mixed_precision\('bf16'\): a function is"
    ):
        both(loss)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduction": "mean"}, "it is 'fast' or 'ordered', the order .* of a sum or a mean, the loss says"),
        ({"seed": "0"}, r"seed='0'\): it is an integer, or None"),
        ({"seed": 0.5}, r"seed=0.5\): it is an integer, or None"),
    ],
)
def test_a_training_steps_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), **options)
