"""Random models whose arithmetic is exact: small integers in float64, ops that are closed on them."""

from __future__ import annotations

from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import FAMILIES, Schedule
from sharding_specs import Mesh

WIDTH, CLASSES = 2, 3
KINDS = ("linear", "residual", "relu", "gate", "skip", "tied", "masked", "widened")
made = schedules.for_ranks
SYNCHRONOUS = sorted(name for name in FAMILIES if name not in ("pipedream", "2bw"))


def parameters(kinds: list[str], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).double()

    return {
        "table": draw(CLASSES, WIDTH),
        "layers": [{"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for _ in kinds],
        "shared": draw(WIDTH, WIDTH),
    }


def residuals(params: Any, x: Tensor) -> Tensor:
    """Not closed on integers, so that any other order of sums shows."""
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean()


def tied_table(params: Any, tokens: Tensor) -> Tensor:
    """A table that the first stage and the last one use."""
    h = params["table"][tokens]
    for weight in params["layers"]:
        h = torch.tanh(h @ weight)
    return (h @ params["table"].T).logsumexp(-1).mean()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CLASSES, (size, 3), generator=generator)
    return tokens, torch.randint(0, 2, (size, 3), generator=generator).bool()


def network(kinds: list[str]) -> Any:
    """A loss with integer and boolean values, skips over many layers, weights in several places."""

    def loss(params: dict[str, Any], tokens: Tensor, keep: Tensor) -> Tensor:
        h = first = params["table"][tokens]
        flags = keep
        for number, (kind, layer) in enumerate(zip(kinds, params["layers"], strict=True)):
            made = bounded(h @ layer["w"] + layer["b"])
            if kind == "residual":
                made = bounded(h + made)
            elif kind == "relu":
                made = torch.relu(made)
            elif kind == "gate":
                made = bounded(made * (h > 0))
            elif kind == "skip":
                made = bounded(made + first)
                first = made
            elif kind == "tied":
                made = bounded(made @ params["shared"] + params["table"][0])
            elif kind == "masked":
                made = torch.where(flags[..., None], made, h)
                flags = flags.logical_xor(tokens == number % CLASSES)
            elif kind == "widened":
                made = torch.cat([made, h], -1)[..., 1 : 1 + WIDTH]
            h = made
        return (bounded(h @ params["shared"]) * flags[..., None]).sum()

    return loss


def bounded(x: Tensor) -> Tensor:
    """Small again, so that sums stay exact; its derivative is 0 or 1."""
    return x.clamp(-4, 4)


kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)


@st.composite
def plans(draw: st.DrawFn, names: list[str] = SYNCHRONOUS, most_ranks: int = 8) -> Schedule:
    """Any synchronous schedule in its domain."""
    name = draw(st.sampled_from(names))
    ranks, microbatches, chunks = (
        draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= most_ranks])),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 3)),
    )
    if name == "dualpipe":
        ranks = ranks + ranks % 2
        microbatches = max(2 * ranks, microbatches + microbatches % 2)
    if name == "dualpipe-v":
        microbatches = max(2 * ranks, microbatches)
    try:
        return made(name, ranks, microbatches, chunks)
    except ScheduleError:  # outside its domain; one without bounds stands in
        return made("zb-h1", ranks, microbatches, chunks)


def pipeline(schedule: Schedule) -> Any:
    return fp.pipeline("pipe", schedule=schedule, microbatches=schedule.microbatches)


def assert_close(a: Any, b: Any) -> None:
    for path, x, y in zip(optree.tree_paths(a), optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


def assert_same(loss: Any, params: Any, *batch: Any, ranks: int = 2, **options: Any) -> Any:
    """Value and gradients of the pipelined loss are the loss's own."""
    plan = fp.pipeline("pipe", **{"microbatches": 4, "schedule": "1f1b", **options})
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=ranks))
    assert_close(step(params, *batch), fp.grad_and_value(loss)(params, *batch))
    return step.program


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / 2
