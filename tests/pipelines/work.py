"""What the processes of `test_processes` run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch

import functional_parallel as fp
from sharding_specs import Mesh, split

from .networks import SYNCHRONOUS, batch, made, network, parameters, pipeline

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

CONFIG = gpt.Config(4, 16, 2, 8)
CONTENTS = ["linear", "skip", "tied", "masked", "gate", "residual", "widened", "relu"]


def gradients(names: list[str], ranks: int) -> dict[str, Any]:
    """Gradients of a small network by every schedule, in floats, where another order of sums shows."""
    found = {}
    for name in names:
        schedule, loss, args = schedule_case(name, ranks)
        step = fp.compile(fp.grad_and_value(pipeline(schedule)(loss)), Mesh(pipe=ranks))
        found[name] = optree.tree_leaves(step(*args))
    return found


def schedule_case(name: str, ranks: int) -> tuple[Any, Any, Any]:
    """A schedule, a network with at least as many layers as it has stages, and float arguments."""
    schedule = made(name, ranks, 2 * ranks)
    contents = (CONTENTS * schedule.depth)[: max(schedule.depth, 8)]
    generator = torch.Generator().manual_seed(1)
    noise = lambda x: x + torch.randn(x.shape, generator=generator, dtype=torch.float64) / 8  # noqa: E731
    params = optree.tree_map(noise, parameters(contents, 0))
    return schedule, network(contents), (params, *batch(2 * schedule.microbatches, 0))


def all_schedules(rank: int, ranks: int) -> dict[str, Any]:
    return gradients(SYNCHRONOUS, ranks)


def trained(
    mesh: Mesh, schedule: str, zero: int | None, steps: int = 3, reduction: str = "ordered", samples: int = 8
) -> Any:
    """A GPT of float64 after some steps of AdamW: parameters, state, losses."""
    params, specs = split(gpt.init(CONFIG, 0))
    params = optree.tree_map(lambda x: x.double(), params)
    transforms = [fp.tensor_parallel("tensor", specs)] if "tensor" in mesh.axis_names else []
    transforms += [fp.zero(zero, "data")] if zero is not None else []
    plan = fp.chain(*transforms, fp.pipeline("pipe", schedule=schedule, microbatches=4))
    step = fp.train_step(
        partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-2), mesh, plan, clip=1.0, seed=0, reduction=reduction
    )
    tokens = torch.randint(0, 256, (samples, 9), generator=torch.Generator().manual_seed(0))
    state, losses = step.init(params), []
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses += [metrics.loss, metrics.grad_norm]
    return optree.tree_leaves((step.whole(state), losses))


def four_ranks(rank: int, names: list[str], samples: int = 8) -> dict[str, Any]:
    return {name: trained(*FOUR[name], samples=samples) for name in names}


FOUR = {
    "pipe and data, zero 1": (Mesh(pipe=2, data=2), "1f1b", 1),
    "pipe and data, zero 3": (Mesh(pipe=2, data=2), "zb-h1", 3),
    "pipe and tensor": (Mesh(pipe=2, tensor=2), "zb-v", None),
    "data outside": (Mesh(data=2, pipe=2), "interleaved", 0),
    "four stages": (Mesh(pipe=4), "1f1b", None),
}


def idle_gradients(rank: int) -> list[Any]:
    """Gradients at every ZeRO stage, of a network with a parameter that it does not use."""
    schedule = made("1f1b", 2, 4)
    params = {**parameters(CONTENTS, 0), "unused": torch.ones(3, 5, dtype=torch.float64)}
    plans = [fp.chain(fp.zero(stage, "data"), pipeline(schedule)) for stage in range(4)]
    steps = [fp.compile(fp.grad_and_value(plan(network(CONTENTS))), Mesh(pipe=2, data=2)) for plan in plans]
    return [step(params, *batch(8, 0)) for step in steps]


def uneven_on_two(rank: int) -> dict[str, Any]:
    """Exact gradients by every schedule, and a trained GPT's bits, of microbatches that do not divide the batch."""
    found = {}
    for name in SYNCHRONOUS:
        schedule = made(name, 2, 4)
        step = fp.compile(fp.grad_and_value(pipeline(schedule)(network(CONTENTS))), Mesh(pipe=2))
        found[name] = optree.tree_leaves(step(parameters(CONTENTS, 0), *batch(11, 0)))
    for name in ("1f1b", "zb-h1", "dualpipe"):
        found[f"{name}, trained"] = trained(Mesh(pipe=2), name, None, samples=7)
    return found
