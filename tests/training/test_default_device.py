"""torch's default device does not matter: each tensor that the library makes names its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

ADAMW, DATA = fp.optim.adamw(fp.optim.schedules.cosine(1e-2, 10, warmup=2)), Mesh(data=2)
PLANS: dict[str, tuple[Any, Mesh, Any, dict[str, Any]]] = {
    "zero": (fp.zero(3, "data"), DATA, ADAMW, {"clip": 1.0}),
    "flat": (fp.zero(2, "data", layout="flat"), DATA, ADAMW, {}),
    "fp16": (fp.chain(fp.mixed_precision("fp16"), fp.zero(1, "data")), DATA, ADAMW, {}),
    "accumulate": (fp.chain(fp.zero(1, "data"), fp.accumulate(2)), DATA, fp.optim.sgd(0.1, momentum=0.9), {}),
    "DiLoCo": (fp.diloco("data", inner=2), DATA, ADAMW, {}),
    "pipeline": (fp.pipeline("pipe", schedule="zb-h1", microbatches=2), Mesh(pipe=2), ADAMW, {}),
    "rate on the host": (fp.data_parallel("data"), DATA, fp.optim.adamw(lambda step: 0.1 / (1 + int(step))), {}),
}
PARAMS = {"layers": [torch.eye(4) for _ in range(4)], "unused": torch.ones(4)}
DATASET = torch.arange(128.0).reshape(32, 4).sin()


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = F.dropout(torch.tanh(x @ layer), 0.1)
    return x.square().mean() * (1 + torch.rand((), device=x.device))


def run(plan: Any, mesh: Mesh, optimizer: Any, options: dict[str, Any], folder: Path) -> list[Tensor]:
    train = fp.train_step(loss, optimizer, mesh, plan, seed=0, **options)
    batches = fp.Sampler(32, 8, Mesh(), ()).epoch(0)
    state, losses = train.init(PARAMS), []
    for batch in batches[:2]:
        state, metrics = train(state, DATASET[batch])
        losses.append(metrics.loss)
    train.save(state, folder)
    state = train.restore(folder, like=PARAMS)
    state = train.load(*train.whole(state), state.step)
    state, metrics = train(state, DATASET[batches[2]])
    return [leaf for leaf in optree.tree_leaves((train.whole(state), losses, metrics)) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.filterwarnings("ignore::functional_parallel.NotTrainedWarning")
def test_a_run(name: str, tmp_path: Path) -> None:
    """A run gives the same bits where the default device has no values."""
    want = run(*PLANS[name], tmp_path / "a")
    with torch.device("meta"):
        got = run(*PLANS[name], tmp_path / "b")
    assert all(x.device.type == "cpu" for x in got)
    assert all(map(torch.equal, got, want))


def test_prepare_eval_and_equivalence() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with torch.device("meta"):
        step = fp.prepare(
            *(module, optimizer), loss=lambda f, x: f(x).square().mean(), mesh=DATA, plan=fp.zero(1, "data"), seed=0
        )
        first = step(DATASET)
        assert first.isfinite() and step(DATASET).isfinite() and first.device.type == "cpu"
        assert step.eval(lambda f, x: f(x))(DATASET).isfinite().all()
        fp.testing.assert_equivalent(
            lambda w, x: (x @ w["layers"][0]).mean(), fp.zero(3, "data"), DATA, PARAMS, DATASET
        )
