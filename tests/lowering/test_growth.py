"""From function to program, work grows as the layers do: counted in Python's calls, which no other program disturbs."""

from __future__ import annotations

import cProfile
import pstats
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, split

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt


def calls(kind: str, layers: int) -> int:
    """Python's calls while a training step of a GPT is made."""
    config = gpt.Config(layers, embed=64, heads=4, time=16, vocab=64)
    with torch.device("meta"):
        params, specs = split(gpt.init(config))
        tokens = torch.empty(16, config.time + 1, dtype=torch.int64)
    mesh, plan = Mesh(data=2, tensor=2), fp.chain(fp.tensor_parallel("tensor", specs), fp.zero(3, "data"))
    if kind == "pipeline":
        plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=4))
        mesh = Mesh(pipe=2, data=2)
    train = fp.train_step(partial(gpt.loss, config=config), fp.optim.adamw(1e-3), mesh, plan, clip=1.0)
    with cProfile.Profile() as profile:
        train.lower(params, tokens).price()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor, zero 3", "pipeline"])
def test_twice_the_layers_take_twice_the_calls(kind: str) -> None:
    calls(kind, 2)  # fills torch's caches
    few, more, most = (calls(kind, layers) for layers in (2, 4, 8))
    print(f"{kind}: {few}, {more}, {most}")
    assert most - more < 2.1 * (more - few)
