"""`explain` names the parameters that a collective transfers, and the line of the model that uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x @ layer["w"]
        x = torch.tanh(x + layer["b"])
    return x.mean()


PARAMS = {"layers": [{"w": torch.eye(4), "b": torch.ones(4)} for _ in range(4)]}
PLANS = {
    "zero 3": fp.zero(3, "data"),
    "zero 1": fp.zero(1, "data"),
    "zero 0": fp.zero(0, "data"),
    "masters": fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data")),
    "tensor": fp.chain(fp.tensor_parallel("tensor", {"*w": P(None, "tensor")}), fp.zero(3, "data")),
    "pipeline": fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=2)),
}


@pytest.mark.parametrize("bucket", [None, "auto"])
@pytest.mark.parametrize("name", PLANS)
def test_parameter_traffic_has_path_and_line(name: str, bucket: str | None) -> None:
    """Every gather and every sum of a gradient over data ranks, in buckets of a layer or of a step too."""
    mesh = Mesh(data=2, **({"tensor": 2} if name == "tensor" else {"pipe": 2} if name == "pipeline" else {}))
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, PLANS[name], bucket=bucket)
    train.lower(PARAMS, torch.ones(8, 4))
    rows = [row for row in train.explain().rows if row.axes == ("data",) and row.operand != "f32[]"]
    lines = {"w": 'x = x @ layer["w"]', "b": 'x = torch.tanh(x + layer["b"])'}
    assert rows and {path for row in rows for path in row.parameters} == {
        f"layers/{layer}/{leaf}" for layer in range(4) for leaf in "wb"
    }
    for row in rows:
        first = row.parameters[0].rpartition("/")[2]
        assert row.text == lines[first], row
        assert bucket or len({path.rpartition("/")[2] for path in row.parameters}) == 1
    assert "layers/*/w" in str(train.explain())


def test_activations_have_no_parameters() -> None:
    plan = fp.tensor_parallel("tensor", {"*w": P("tensor")})
    step = fp.compile(fp.grad(plan(lambda params, x: (x @ params["w"]).square().sum())), Mesh(tensor=2))
    explained = step.explain({"w": torch.eye(4)}, torch.ones(8, 4))
    assert explained.rows
    assert not any(row.parameters for row in explained.rows) and "parameters" not in str(explained).splitlines()[2]
