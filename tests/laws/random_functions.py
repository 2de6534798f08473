"""Random functions that are closed on the integers, and random specs for what they take.

A function is a list of steps over a growing list of 2-D values of any shape. Every step keeps numbers small, so that
sums of products stay far below 2^53 and equality is exact, whatever the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from hypothesis import strategies as st

from sharding_specs import Mesh, P

Step = tuple[str, int, int]

ROWS, INNER = 8, 8


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return einsum(x, w, "rows inner, inner columns -> rows columns")


def _heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Split into heads, mix rows within a head, join again."""
    parts = rearrange(x, "rows (heads dim) -> heads rows dim", heads=heads_of(x.shape[1]))
    mixed = einsum(parts, parts, "heads a dim, heads b dim -> heads a b").clamp(-2, 2)
    return rearrange(einsum(mixed, parts, "heads a b, heads b dim -> heads a dim"), "h rows dim -> rows (h dim)")


def heads_of(inner: int) -> int:
    """The number of heads that a width is split into: its smallest divisor above one."""
    return next(count for count in range(2, inner + 1) if inner % count == 0)


def _joined(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Columns of two values, and rows of two: a first part of each, then a second part of the other."""
    half, rows = x.shape[1] // 2, x.shape[0] // 2
    columns = torch.cat([x[:, :half], (x @ w).clamp(-4, 4)[:, half:]], 1)
    return torch.cat([columns[:rows], x[rows:]]) if rows else columns


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
    "join": _joined,
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


def arguments(
    seed: int, count: int = 3, rows: int = ROWS, inner: int = INNER
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Small integers in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    return {f"w{index}": draw(inner, inner) for index in range(count)}, draw(rows, inner)


@st.composite
def meshes(draw: st.DrawFn, most_ranks: int = 8) -> Mesh:
    """Meshes of one to three of the axes "data", "tensor" and "expert", in any order, of 1 to 4 ranks each."""
    names = draw(st.permutations(["data", "tensor", "expert"]))[: draw(st.integers(1, 3))]
    left, sizes = most_ranks, {}
    for name in names:
        sizes[name] = draw(st.integers(1, min(4, left)))
        left //= sizes[name]
    return Mesh(sizes)


@st.composite
def shapes(draw: st.DrawFn, mesh: Mesh) -> tuple[int, int]:
    """Rows and columns, odd ones too; the data axis divides the rows, or splits no batch (`is_split`)."""
    data = mesh.shape.get("data", 1)
    rows = draw(st.one_of(st.integers(1, 3).map(lambda count: count * data), st.integers(2, 9)))
    return rows, draw(st.sampled_from([2, 3, 4, 5, 6, 8, 9, 12]))


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh, count: int = 3, rows: int = ROWS, inner: int = INNER
) -> tuple[dict[str, P], P]:
    """Specs of the parameters and of the batch over all axes but "data": each axis on a dim or none."""
    specs = {f"w{index}": draw(_layout(mesh, (inner, inner))) for index in range(count)}
    return specs, draw(_layout(mesh, (rows, inner)))


@st.composite
def _layout(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, int]) -> P:
    dims: list[list[str | int]] = [[], []]
    left = list(shape)
    for axis in draw(st.permutations([axis for axis in mesh.axis_names if axis != "data"])):
        size = mesh.axis_size(axis)
        dim = draw(st.sampled_from([None, *(dim for dim in (0, 1) if left[dim] % size == 0)]))
        if dim is None:
            continue
        dims[dim].append(axis)
        left[dim] //= size
    if dims[1] and left[1] > 1 and draw(st.booleans()):  # inside of what heads are split into
        heads = heads_of(shape[1])
        dims[1] = [heads, *dims[1]] if left[1] % heads == 0 else dims[1]
    return P(*map(tuple, dims))
