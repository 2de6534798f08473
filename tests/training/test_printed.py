"""The text of objects that a user holds."""

from __future__ import annotations

import torch

import functional_parallel as fp
from sharding_specs import Mesh


def loss(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ params).square().mean()


PLAN = fp.chain(fp.remat(), fp.zero(1, "data"))


def test_every_object_says_what_it_is() -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), PLAN, clip=1.0)
    state = train.init(torch.ones(4))
    assert repr(train.optimizer) == "Optimizer(adamw)"
    assert repr(train) == ("train_step(loss → zero(1, 'data'), Optimizer(adamw), Mesh(data=2), clip=1.0)")
    assert repr(state) == "TrainState(step=0, parameters=1, mesh=Mesh(data=2))"
    train(state, torch.ones(2, 4))
    assert repr(state).endswith(", donated)")


def test_a_layout_says_its_axes_and_requests() -> None:
    assert repr(PLAN(loss).specs) == (
        "Applied(zero(1, 'data'); local over 'data'; requests: pass 'remat', batch sharded over 'data', "
        "update sharded over 'data')"
    )
    assert repr(fp.partition(loss, "i", None, None).specs).startswith("Applied(")
