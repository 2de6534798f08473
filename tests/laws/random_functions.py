"""Random functions that are closed on the integers, and random specs for what they take.

A function is a list of steps over a growing list of 2-D and 3-D values. Every step keeps numbers small, so that sums of
products stay far below 2^53 and equality is exact, whatever the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from hypothesis import strategies as st

from sharding_specs import Mesh, P

Step = tuple[str, int, int]

ROWS, INNER, HEADS = 8, 8, 2


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return einsum(x, w, "rows inner, inner columns -> rows columns")


def _heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Split into heads, mix rows within a head, join again."""
    parts = rearrange(x, "rows (heads dim) -> heads rows dim", heads=HEADS)
    mixed = einsum(parts, parts, "heads a dim, heads b dim -> heads a b").clamp(-2, 2)
    return rearrange(einsum(mixed, parts, "heads a b, heads b dim -> heads a dim"), "h rows dim -> rows (h dim)")


def _gathered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows of a table, chosen by numbers that follow from x."""
    rows = x.detach().sum(1).long() % w.shape[0]
    return x + torch.nn.functional.embedding(rows, w)


def apart(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Without ties along a dim, which an order would break as it likes; and a third of a gradient is no float."""
    numbers = torch.arange(x.shape[dim], dtype=x.dtype)
    return x * 16 + (numbers if dim else numbers[:, None])


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": _product,
    "transposed product": lambda x, w: x @ w.t(),
    "heads": _heads,
    "embedding": _gathered,
    "add": lambda x, w: x + w.sum(0),
    "multiply": lambda x, w: x * w[0],
    "relu": lambda x, w: torch.relu(x),
    "row maximum": lambda x, w: x - apart(x, 1).amax(1, keepdim=True),
    "column maximum": lambda x, w: x - apart(x, 0).amax(0),
    "row sum": lambda x, w: x + x.sum(1, keepdim=True),
    "column sum": lambda x, w: x + x.sum(0),
    "where": lambda x, w: torch.where(x > w.mean().floor(), x, apart(w, 0).amin(0)),
    "join": lambda x, w: torch.cat([x[:, :4], w[: x.shape[0], 4:]], 1),
    "flatten": lambda x, w: (x.reshape(-1) + 1).reshape(x.shape),
}


@dataclass(frozen=True)
class Program:
    """A random function of parameters `{"w0": …}` and a batch: a scalar."""

    steps: tuple[Step, ...]

    def __call__(self, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, source, weight in self.steps:
            found = STEPS[name](values[source % len(values)], params[f"w{weight % len(params)}"])
            values.append(found.clamp(-4, 4))
        return sum((value * (index + 1)).sum() for index, value in enumerate(values))  # type: ignore[return-value]

    @property
    def __name__(self) -> str:
        return " → ".join(name for name, _, _ in self.steps)


def programs(most_steps: int = 5) -> st.SearchStrategy[Program]:
    step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 2))
    return st.lists(step, min_size=1, max_size=most_steps).map(lambda steps: Program(tuple(steps)))


def arguments(seed: int, count: int = 3) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Small integers in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    return {f"w{index}": draw(INNER, INNER) for index in range(count)}, draw(ROWS, INNER)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, count: int = 3) -> tuple[dict[str, P], P]:
    """Specs of the parameters, and of the batch, over the axis "tensor"; every legal choice."""
    choices = [P(), P("tensor"), P(None, "tensor")]
    if INNER % (HEADS * mesh.axis_size("tensor")) == 0:
        choices.append(P(None, (HEADS, "tensor")))
    specs: dict[str, Any] = {f"w{index}": draw(st.sampled_from(choices)) for index in range(count)}
    return specs, draw(st.sampled_from(choices))
