"""A GPT with tied embeddings on data × tensor × pipe trains as on one rank: the same losses, step for step."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, split

from ..processes import run_on_processes

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import corpus
import gpt

CONFIG = gpt.Config(layers=2, embed=32, heads=2, time=32, tied=True)
MESH = Mesh(pipe=2, data=2, tensor=2)


def losses(
    mesh: Mesh,
    zero: int,
    steps: int,
    precision: str | None = None,
    schedule: str = "1f1b",
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    params, specs = split(gpt.init(CONFIG, 0))
    params = optree.tree_map(lambda x: x.to(dtype), params)
    text, _ = corpus.load(None)
    inner: list[Any] = [fp.mixed_precision(precision)] if precision else []
    if mesh.size > 1:
        inner += [
            fp.tensor_parallel("tensor", specs),
            fp.zero(zero, "data"),
            fp.pipeline("pipe", schedule=schedule, microbatches=4),
        ]
    optimizer = fp.optim.adamw(2e-3, betas=(0.9, 0.95))
    train = fp.train_step(partial(gpt.loss, config=CONFIG), optimizer, mesh, fp.chain(*inner), clip=1.0)
    state, found = train.init(params), []
    for step in range(steps):
        state, metrics = train(state, corpus.batch(text, 16, CONFIG.time, step, 0))
        found.append(float(metrics.loss))
    return found


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@cache
def alone(steps: int) -> list[float]:
    return losses(Mesh(), 0, steps)


def test_the_first_steps() -> None:
    """ZeRO 1 and 1f1b are those of eight processes below."""
    for zero, schedule in [(0, "zb-v"), (3, "interleaved")]:
        assert apart(losses(MESH, zero, 3, schedule=schedule), alone(3)) < 1e-12


@pytest.mark.slow
def test_two_hundred_steps_on_simulated_ranks() -> None:
    one = alone(200)
    assert one[0] - min(one[-10:]) > 1
    for zero in (0, 1):
        assert apart(losses(MESH, zero, 200), one) < 1e-10
    narrow = [losses(mesh, 1, 200, dtype=torch.float32) for mesh in (Mesh(), MESH)]
    assert apart(*narrow) < 2e-4  # a float32's rounding, which AdamW makes larger step by step


@pytest.mark.slow
def test_bf16() -> None:
    """A bf16 has 8 bits, so a loss is known to about 0.01; over a hundred steps the paths part by some of that."""
    one = losses(Mesh(), 0, 100, dtype=torch.float32)
    narrow = losses(MESH, 1, 100, "bf16", dtype=torch.float32)
    assert apart(narrow, one) < 0.1
    assert one[0] - min(narrow[-10:]) > 1


def on_eight(rank: int, steps: int) -> list[float]:
    return losses(MESH, 1, steps)


@pytest.mark.parametrize(("steps", "bound"), [(3, 1e-12), pytest.param(200, 1e-10, marks=pytest.mark.slow)])
def test_steps_on_eight_processes(steps: int, bound: float) -> None:
    for found in run_on_processes(on_eight, MESH.size, steps, timeout=1200):
        assert apart(found, alone(steps)) < bound


# -----------------------------------------------------------------------------
# What an optimizer sees of stacked layers
# -----------------------------------------------------------------------------

STACKED = {"blocks": {"b": P("pipe"), "w": P("pipe")}}


def blocks() -> dict[str, Any]:
    return {"blocks": {"b": torch.full((4, 2), 3.0).double(), "w": torch.eye(2).double().repeat(4, 1, 1)}}


def through_blocks(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w, b in zip(params["blocks"]["w"], params["blocks"]["b"], strict=True):
        x = x @ w + b
    return x.sum()


@pytest.mark.parametrize("kind", [fp.optim.adamw, fp.optim.sgd])
@pytest.mark.parametrize(
    "decay",
    [{"*/b": False}, {"blocks/b": 0.5}, lambda path, leaf: leaf.ndim > 2, lambda path, leaf: path.endswith("b")],
)
@pytest.mark.every(2)
def test_a_layer_decays_as_its_stack_does(kind: Any, decay: Any) -> None:
    def trained(mesh: Mesh, plan: Any) -> Any:
        train = fp.train_step(through_blocks, kind(0.5, weight_decay=0.5, decay=decay), mesh, plan)
        state, _ = train(train.init(blocks()), torch.ones(4, 2).double())
        return train.params(train.load(*train.whole(state), state.step))

    piped = trained(Mesh(pipe=2), fp.pipeline("pipe", STACKED, microbatches=2))
    assert optree.tree_all(optree.tree_map(torch.equal, piped, trained(Mesh(), None)))


def test_an_optimizer_that_needs_a_whole_stack_is_refused() -> None:
    train = fp.train_step(
        through_blocks, fp.optim.adafactor(0.1), Mesh(pipe=2), fp.pipeline("pipe", STACKED, microbatches=2)
    )
    with pytest.raises(ValueError, match=r"blocks/b is a stack of layers, .* not elementwise"):
        train.init(blocks())
