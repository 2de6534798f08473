"""Sixty-four simulated ranks in one process: whole training steps, equal to those of one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime.classes import RankClasses
from sharding_specs import Mesh, P, split

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

D = torch.float64
CONFIG = gpt.Config(layers=1, embed=32, heads=4, time=8, vocab=32)


def tensor(specs: Any) -> Any:
    return fp.tensor_parallel("tensor", specs)


def pipeline() -> Any:
    return fp.pipeline("pipe", schedule="1f1b", microbatches=4)


PLANS: dict[str, Callable[[Any], tuple[Mesh, Any]]] = {
    "ddp": lambda _: (Mesh(data=64), fp.data_parallel("data")),
    "zero 3": lambda _: (Mesh(data=64), fp.zero(3, "data")),
    "hsdp": lambda _: (Mesh(replica=8, data=8), fp.chain(fp.zero(3, "data"), fp.data_parallel("replica"))),
    "tensor": lambda specs: (Mesh(data=16, tensor=4), fp.chain(tensor(specs), fp.zero(1, "data"))),
    "all": lambda specs: (
        Mesh(data=8, tensor=4, pipe=2),
        fp.chain(tensor(specs), fp.zero(1, "data"), pipeline()),
    ),
}


def trained(mesh: Mesh, plan: Any, config: gpt.Config = CONFIG, steps: int = 2) -> tuple[Any, list[torch.Tensor]]:
    """Parameters after some steps of a GPT, and what the steps reported."""
    params = optree.tree_map(lambda x: x.to(D), split(gpt.init(config))[0])
    train = fp.train_step(partial(gpt.loss, config=config), fp.optim.adamw(1e-2), mesh, plan, clip=1.0)
    state, reported = train.init(params), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        state, metrics = train(state, torch.randint(0, config.vocab, (64, config.time + 1), generator=generator))
        reported += [metrics.loss, metrics.grad_norm]
    return train.params(state), reported


@pytest.fixture(scope="module")
def alone() -> Any:
    return trained(Mesh(), None)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.every(3)
def test_a_gpt_trains_as_on_one_rank(name: str, alone: Any) -> None:
    mesh, plan = PLANS[name](split(gpt.init(CONFIG))[1])
    assert mesh.size == 64
    found = trained(mesh, plan)
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


SPECS = {"*/up": P(None, "tensor"), "*/down": P("tensor", None)}


def network(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    for block in params:
        x = x + torch.relu(x @ block["up"]) @ block["down"]
    return (x * y).sum()


@pytest.mark.parametrize("name", PLANS)
def test_integers_are_exact(name: str) -> None:
    """Sums, products and maxima of integers in float64: gradients and updates are one rank's to the bit."""
    draw = torch.Generator().manual_seed(1)
    integers = lambda *shape: torch.randint(-2, 3, shape, generator=draw).to(D)  # noqa: E731
    params = [{"up": integers(8, 16), "down": integers(16, 8)} for _ in range(2)]
    batch = (integers(128, 8), integers(128, 8))
    results = []
    for mesh, plan in (PLANS[name](SPECS), (Mesh(), None)):
        train = fp.train_step(network, fp.optim.sgd(1.0), mesh, plan)
        state, metrics = train(train.init(params), batch)
        results.append((train.params(state), metrics.loss))
    assert all(map(torch.equal, *map(optree.tree_leaves, results)))


class Counted:
    """Counts Python's calls while it is entered."""

    def __enter__(self) -> Counted:
        self.count = 0
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


def test_work_grows_as_the_ranks_do() -> None:
    """Of a step that is compiled: eight times the ranks, at most eight times the calls."""
    params = [{"up": torch.ones(64, 64, dtype=D), "down": torch.ones(64, 64, dtype=D)} for _ in range(2)]
    batch = (torch.ones(128, 64, dtype=D), torch.ones(128, 64, dtype=D))
    counts = []
    for ranks in (8, 64):
        train = fp.train_step(network, fp.optim.adamw(1e-3), Mesh(data=ranks), fp.zero(3, "data"))
        state, _ = train(train.init(params), batch)
        with Counted() as counted:
            train(state, batch)
        counts.append(counted.count)
    assert counts[1] < 8.2 * counts[0]


def test_groups_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a program asks for the ranks of each group once, however many ops it has."""
    listed: list[Any] = []
    groups, index = Mesh.groups, RankClasses.index
    monkeypatch.setattr(Mesh, "groups", lambda mesh, axes: listed.append(axes) or groups(mesh, axes))
    asked: list[int] = []
    monkeypatch.setattr(RankClasses, "index", lambda self, rank, axes: asked.append(rank) or index(self, rank, axes))
    counts = []
    for blocks in (1, 4):
        params = [{"up": torch.ones(64, 64, dtype=D), "down": torch.ones(64, 64, dtype=D)} for _ in range(blocks)]
        train = fp.train_step(network, fp.optim.sgd(1e-3), Mesh(data=16, tensor=4), PLANS["tensor"](SPECS)[1])
        train(train.init(params), (torch.ones(128, 64, dtype=D), torch.ones(128, 64, dtype=D)))
        assert len(listed) == len(set(map(str, listed)))
        counts.append(len(asked))
        listed.clear()
        asked.clear()
    assert counts[1] <= counts[0]
