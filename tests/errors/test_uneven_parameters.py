"""Parameters that a mesh axis does not divide, under every stage of ZeRO."""

from __future__ import annotations

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_another_axis_does_not_divide_are_named(stage: int) -> None:
    plan = fp.chain(fp.tensor_parallel("tensor", {"*": P(None, "tensor")}), fp.zero(stage, "data"))
    train = fp.train_step(lambda p, x: (x @ p["w"] @ p["o"]).sum(), fp.optim.sgd(0.1), Mesh(data=2, tensor=2), plan)
    with pytest.raises(SpecError, match=r"\n  o: shape \(8, 3\), P\(.*'tensor'\): dim 1 of size 3 does not divide"):
        train.init({"w": torch.zeros(6, 8), "o": torch.zeros(8, 3)})
