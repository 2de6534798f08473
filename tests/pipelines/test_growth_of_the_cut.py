"""The cut of a pipeline takes twice the work for twice the layers, counted in calls and in searches through lists."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import Traced
from functional_parallel.lowering import rewrite
from sharding_specs import Mesh

WIDTH = 4


class Searched(list[Any]):
    """List that counts the elements that searches go through."""

    looks = 0

    def __contains__(self, value: object) -> bool:
        Searched.looks += len(self)
        return super().__contains__(value)

    def index(self, *args: Any) -> int:
        Searched.looks += len(self)
        return super().index(*args)

    def count(self, value: object) -> int:
        Searched.looks += len(self)
        return super().count(value)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    scale = (torch.arange(WIDTH) + 1.0).rsqrt()  # each stage computes it
    for layer in params:
        x = x + torch.tanh(x @ layer["in"] * scale + layer["bias"]) @ layer["out"]
    return (x * x).mean()


def counts(layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each function while a pipeline is cut, and the elements that are searched."""
    layer = {"in": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH), "out": torch.ones(WIDTH, WIDTH)}
    plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=4))
    step = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(pipe=4, data=2), plan, clip=1.0)
    profile, build = cProfile.Profile(), rewrite.build

    def searched(self: Traced, name: str, value: Any) -> None:
        object.__setattr__(self, name, Searched(value) if name in ("inputs", "outputs") else value)

    def profiled(*args: Any) -> Any:
        Searched.looks = 0
        with monkeypatch.context() as patch:
            patch.setattr(Traced, "__setattr__", searched)
            return profile.runcall(build, *args)

    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "build", profiled)
        program = step.lower([layer] * layers, torch.ones(16, WIDTH))
    found = Counter({"elements searched": Searched.looks, "programs": len(list(program.every_program()))})
    for (file, line, name), (_, calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[f"{name} ({file}:{line})"] += calls
    return found


def test_twice_the_layers_take_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more, most = (counts(layers, monkeypatch) for layers in (4, 8, 16))
    grown = {
        name: (few[name], more[name], most[name])
        for name in most
        if most[name] > 400 and most[name] - more[name] > 2.2 * (more[name] - few[name])
    }
    assert not grown, "\n".join(f"{name}: {each}" for name, each in grown.items())
    assert few["programs"] == more["programs"] == most["programs"]  # equal sums share one
