"""A script that loads its batches by `fp.Sampler` is right simulated and on real processes, without a switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes

PLANS = {
    "data": (Mesh(data=2), fp.zero(2, "data")),
    "pipeline": (
        Mesh(pipe=2, data=1),
        fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", schedule="1f1b", microbatches=2)),
    ),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    hidden = fp.stage_boundary(torch.tanh(x @ params["w1"]))
    each = ((hidden @ params["w2"] - y) ** 2).mean(1)
    return (each * present).sum() / present.sum()


def script(name: str) -> dict[str, Any]:
    """Train for two epochs and predict; the last batch of an epoch is short by one sample."""
    mesh, plan = PLANS[name]
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(11, 4, generator=draw, dtype=torch.float64) for _ in range(2)))
    params = {f"w{n}": torch.randn(4, 4, generator=draw, dtype=torch.float64) for n in (1, 2)}
    sampler = fp.Sampler(len(data), 4, mesh)
    train = fp.train_step(loss, fp.optim.adamw(0.05), mesh, plan, batch="own", reduction="ordered")
    state, losses, seen = train.init(params), [], []
    for epoch in range(2):
        loader = DataLoader(data, batch_sampler=[block for block in sampler.epoch(epoch) if block])
        for (x, y), present in fp.even_batches(loader, sampler.rows, mesh):
            state, metrics = train(state, x, y, present)
            losses.append(metrics.loss.item())
            seen += x[present][:, 0].tolist()
    position, samples = next(sampler.run(start=fp.Position(1, 2)))
    evaluate = train.compile(plan(loss))
    final = evaluate(state, x, y, present).item()
    return {
        "losses": [*losses, final],
        "params": train.params(state),
        "seen": seen,
        "run": (position, samples),
        "rank": fp.rank(),
        "lowered": str(train.lower(state, x, y, present)),
    }


def on_ranks(rank: int, name: str) -> dict[str, Any]:
    found = script(name)
    assert found["rank"] == rank
    return found


@pytest.mark.parametrize("name", PLANS)
def test_one_script_gives_the_same_losses_simulated_and_on_processes(name: str) -> None:
    alone, real = script(name), run_on_processes(on_ranks, 2, name)
    assert alone["rank"] == 0 and len(alone["losses"]) == 7
    for found in real:
        assert found["losses"] == alone["losses"]
        assert all(torch.equal(found["params"][path], alone["params"][path]) for path in found["params"])
        assert found["lowered"] == alone["lowered"], "the same program, of the global batch"
        assert found["run"][0] == alone["run"][0]
    if name == "data":
        assert len(alone["seen"]) == 22 and [len(found["seen"]) for found in real] == [12, 10]
        assert sorted(real[0]["seen"] + real[1]["seen"]) == sorted(alone["seen"])
        assert real[0]["run"][1] + real[1]["run"][1] == alone["run"][1]
