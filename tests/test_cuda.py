"""On a CUDA device, where there is one: the same numbers as on the CPU, by simulated ranks and under nccl."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

import functional_parallel as fp
from sharding_specs import Mesh, P, split

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = gpt.Config(2, 32, 4, 16)


def trained(device: str, plan: Any, mesh: Mesh, dtype: torch.dtype = torch.float64, **options: Any) -> list[Any]:
    params, _ = split(gpt.init(CONFIG, 0))
    params = optree.tree_map(lambda x: x.to(device, dtype), params)
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0)).to(device)
    train = fp.train_step(partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-2), mesh, plan, clip=1.0, **options)
    state, losses = train.init(params), []
    for _ in range(5):
        state, metrics = train(state, tokens)
        losses.append(metrics.loss)
    leaves = optree.tree_leaves((train.params(state), losses))
    assert {leaf.device.type for leaf in leaves} == {torch.device(device).type}
    return [leaf.cpu() for leaf in leaves]


SPECS = split(gpt.init(CONFIG, 0))[1]
PLANS = {
    "one rank": (None, Mesh()),
    "data parallel": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (fp.tensor_parallel("tensor", SPECS), Mesh(tensor=2)),
    "unequal microbatches": (fp.pipeline("pipe", microbatches=3), Mesh(pipe=2)),
    "all": (
        fp.chain(
            fp.remat(), fp.tensor_parallel("tensor", SPECS), fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)
        ),
        Mesh(pipe=2, data=2, tensor=2),
    ),
}


@pytest.mark.parametrize("name", ["zero 3", "tensor"])
def test_inductor_on_the_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plan, mesh = PLANS[name]
    found = trained("cuda", plan, mesh, backend="inductor")
    for a, b in zip(found, trained("cpu", plan, mesh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_simulated_ranks_on_the_device(name: str) -> None:
    plan, mesh = PLANS[name]
    for a, b in zip(trained("cuda", plan, mesh), trained("cpu", plan, mesh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_the_device(precision: str) -> None:
    plan = fp.mixed_precision(precision)
    got = trained("cuda", plan, Mesh(), torch.float32)
    wanted = trained("cpu", None, Mesh(), torch.float32)
    assert abs(got[-1] - wanted[-1]) < 0.05


def test_dropout_draws_the_same_numbers_everywhere() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (fp.random.dropout(x @ w, 0.5) ** 2).mean()

    values = []
    for device in ("cpu", "cuda"):
        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.data_parallel("data"), seed=0)
        w, x = torch.ones(4, 4, dtype=torch.float64), torch.arange(32, dtype=torch.float64).view(8, 4)
        values.append(train(train.init(w.to(device)), x.to(device))[1].loss.cpu())
    torch.testing.assert_close(*values)


def on_nccl(rank: int, port: int, results: Any) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    results.put([leaf.numpy() for leaf in trained("cuda", fp.zero(3, "data"), Mesh(data=1))])
    torch.distributed.destroy_process_group()


def test_one_rank_under_nccl() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=on_nccl, args=(0, 29561, results))
    worker.start()
    found = results.get(timeout=240)
    worker.join()
    for a, b in zip(found, trained("cpu", None, Mesh()), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("columns", [24, 10], ids=["aligned", "not aligned"])
def test_grouped_products_on_the_device(columns: int) -> None:
    """By torch's kernel, or where that refuses the rows' alignment group by group."""
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    rows, matrices = torch.randn(8, 16), torch.randn(3, 16, columns)
    gradient = fp.grad_and_value(lambda a, b, ends: (F.grouped_mm(a, b, offs=ends) ** 2).sum(), (0, 1))
    step = fp.compile(gradient, Mesh(), in_specs=(P(), P(), P()), out_specs=P())
    on_device = optree.tree_leaves(step(rows.cuda(), matrices.cuda(), ends.cuda()))
    for found, want in zip(on_device, optree.tree_leaves(step(rows, matrices, ends)), strict=True):
        torch.testing.assert_close(found.cpu(), want, rtol=1e-2, atol=1e-2)
