"""Of which part of a step a collective is, wherever a pass puts it."""

from __future__ import annotations

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh


def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_scattered_as_soon_as_they_are_there(stage: int, microbatches: int) -> None:
    """Those of ZeRO-1 and 2 are the update's, though the backward goes on after the first of them."""
    plan = fp.zero(stage, "data") if microbatches == 1 else fp.chain(fp.zero(stage, "data"), fp.accumulate(2))
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan, bucket=2048)
    program = train.lower(train.init([torch.randn(16, 16) for _ in range(6)]), torch.ones(8, 16))
    phases: dict[str, set[str]] = {}
    for one in program.collectives():
        phases.setdefault(one.kind, set()).add(one.phase)
    assert phases["psum"] == {"forward", "update"}  # the loss, the gradients' norm
    if stage < 3:
        assert phases["psum_scatter"] == phases["all_gather"] == {"update"}
    else:
        assert phases["all_gather"] == {"forward", "backward"}
        assert phases["psum_scatter"] <= {"backward", "update"}
