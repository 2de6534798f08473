"""Evaluation on a full test set: each sample counts once, on simulated ranks and on processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes
from .test_on_state import PLANS, parameters

MESH = Mesh(data=2)
X = torch.arange(24.0).view(8, 3)


def counted(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).new_ones(len(x)).sum()


def count(rank: int, batch: str | None, prepared: bool) -> tuple[float, list[str]]:
    """Return the number of samples that an evaluation counts, and the warnings."""
    plan = fp.data_parallel("data")
    if prepared:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer, loss = torch.optim.SGD(net.parameters(), 0.1), lambda model, x: model(x).mean()
        step = fp.prepare(net, optimizer, loss=loss, mesh=MESH, plan=plan, batch="own")
        evaluate = step.eval(lambda model, x: model(x).new_ones(len(x)).sum(), batch=batch)
    else:
        train = fp.train_step(lambda w, x: (x @ w).mean(), fp.optim.sgd(0.1), MESH, plan, batch="own")
        compiled, state = train.compile(plan(counted), batch=batch), train.init(torch.ones(3))
        evaluate = lambda x: compiled(state, x)  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = evaluate(X)
        assert torch.equal(evaluate(X), value)
    return float(value), [str(each.message) for each in caught]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_test_set_that_every_rank_passes(prepared: bool) -> None:
    """With batch="own" each sample was counted twice, without a word."""
    assert run_on_processes(count, 2, "global", prepared) == [(8.0, [])] * 2
    assert count(0, "global", prepared) == count(0, None, prepared) == (8.0, [])
    for value, (said,) in run_on_processes(count, 2, None, prepared):  # one warning for two calls
        assert value == 16.0
        assert (
            "(batch='own'): all ranks passed equal 0, which count as 2 shards of a batch, each sample 2 times" in said
        )
        assert "batch='global'" in said


def own_parts(rank: int) -> int:
    """Train and evaluate on parts that differ in one of two arguments; a replicated argument is equal on all ranks."""
    plan = fp.data_parallel("data")
    train = fp.train_step(lambda w, x, m, s: (x @ w * m).mean() * s, fp.optim.sgd(0.1), MESH, plan, batch="own")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _ = train(train.init(torch.ones(3)), X[4 * rank : 4 * rank + 4], torch.ones(4), torch.tensor(2.0))
        train.compile(plan(counted))(state, X[4 * rank : 4 * rank + 4])
    return len(caught)


def test_no_warning_for_shards() -> None:
    assert run_on_processes(own_parts, 2) == [0, 0]


def test_a_batch_that_is_neither() -> None:
    train = fp.train_step(lambda w, x: (x @ w).mean(), fp.optim.sgd(0.1), MESH, fp.data_parallel("data"))
    with pytest.raises(ValueError, match=r"train_step.compile\(batch='mine'\): it is 'global' or 'own'"):
        train.compile(fp.data_parallel("data")(counted), batch="mine")


# --- The mean over a loader, as docs/how_do_i.md has it ---


def totals(params: dict[str, Any], batch: list[Tensor], present: Tensor) -> tuple[Tensor, Tensor]:
    x, y = batch
    each = (fp.stage_boundary(x @ params["w1"]) @ params["w2"] - y).square().sum(1)
    return (each * present).sum(), present.sum()


def mean_over(plan: str, samples: int) -> tuple[Tensor, Tensor]:
    """Return the mean over a loader with a short last batch, and the mean of full tensors: integers over a count."""
    how, mesh = PLANS[plan]
    draw = torch.Generator().manual_seed(samples)
    x, y = (torch.randint(-3, 4, (samples, 3), generator=draw).double() for _ in range(2))
    params = {name: leaf.round() if isinstance(leaf, Tensor) else leaf for name, leaf in parameters().items()}

    def loss(params: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
        return totals(params, [x, y], torch.ones(len(x), dtype=torch.bool))[0]

    train = fp.train_step(loss, fp.optim.sgd(0.0), mesh, how, batch="own")
    evaluate, state = train.compile(how(totals), batch="global"), train.init(params)
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=8)
    found = [evaluate(state, *fp.pad_batch(batch, 8)) for batch in loader]
    mean = sum(total for total, _ in found) / sum(number for _, number in found)
    return mean, loss(params, x, y) / samples


@pytest.mark.parametrize("plan", PLANS)
def test_the_mean_over_a_loader_is_exact(plan: str) -> None:
    for samples in (11, 16, 1):
        found, wanted = mean_over(plan, samples)
        assert torch.equal(found, wanted)


def mean_on_a_rank(rank: int) -> bool:
    return torch.equal(*mean_over("flat", 11))


def test_the_mean_over_a_loader_on_processes() -> None:
    assert all(run_on_processes(mean_on_a_rank, 2))
