"""Equal calls of marked functions are traced once, and the program is the one that all of them would give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import aval_of, info, program_text, without_repeats
from functional_parallel.tracing import trace
from sharding_specs import Mesh, P

LAYERS, WIDTH = 5, 4
PLAN, MESH = fp.data_parallel("data"), Mesh(data=2)
CONSTANT = torch.arange(float(WIDTH), dtype=torch.float64)


def ran() -> None:
    """Every layer calls it, so that runs of layers can be counted from outside."""


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parameters() -> list[Any]:
    return [{"w": draw(WIDTH, WIDTH) + n, "b": draw(WIDTH) * n} for n in range(LAYERS)]


Layer = Callable[..., Any]
Mark = Callable[[Layer], Layer]
Loss = Callable[[Mark, Any, Tensor], Tensor]


def affine(p: Any, x: Tensor) -> Tensor:
    ran()
    return torch.tanh(x @ p["w"] + p["b"])


def plain(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(affine)
    for p in params:
        x = layer(p, x)
    return x


def with_keywords(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, *, x: Tensor, scale: float = 2.0) -> Tensor:
        return affine(p, x) * scale

    for p in params:
        x = layer(p, x=x, scale=0.5)
    return x


def with_a_shared_mask(mark: Mark, params: Any, x: Tensor) -> Tensor:
    mask, shift = x > 0, x.mean(-1, keepdim=True)
    layer = mark(lambda p, x, mask: torch.where(mask, affine(p, x), x) + shift)
    for p in params:
        x = layer(p, x, mask)
    return x


def with_several_results(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor) -> dict[str, Any]:
        y = affine(p, x)
        return {"out": y, "row": y[0], "given": (x, x.T), "count": 3, "none": None}

    total = x.sum() * 0
    for p in params:
        found = layer(p, x)
        x = found["out"] + found["given"][1].T
        total = total + found["row"].sum() * found["count"]
    return x + total


def results_that_share_memory(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """A write through one of them is seen in the others, and one into a view of the argument in the argument."""

    @mark
    def layer(p: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = affine(p, x)
        return y, y[:, 1:], x[:, 0]

    for p in params:
        y, part, first = layer(p, x)
        part.mul_(2)
        x = y.clone().add_(first[:, None])
        first.add_(1)
    return x


def parts_that_are_written(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """Later writes into the results of the first calls do not change what the others copy."""
    layer = mark(lambda p, x: (affine(p, x).chunk(2, -1), affine(p, x).unbind(0)))
    for p in params:
        (left, right), (first, *rest) = layer(p, x)
        left.add_(1)
        first.mul_(2)
        x = torch.cat([left, right], -1) + torch.stack([first, *rest])
    return x


@dataclass
class Layered:
    weights: Tensor
    shift: Tensor
    scale: float


def with_dataclasses(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(given: Layered, x: Tensor) -> Layered:
        y = affine({"w": given.weights, "b": given.shift}, x) * given.scale
        return Layered(y, y[0], 2.0)

    for p in params:
        found = layer(Layered(p["w"], p["b"], 0.5), x)
        x = found.weights * found.scale + found.shift
    return x


def with_writes_inside(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        y = affine(p, x).clone()
        y[:, 0] += 1
        y.view(-1)[2:].mul_(2)
        return y.relu_()

    for p in params:
        x = layer(p, x)
    return x


def with_constants(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: affine(p, x) + CONSTANT + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype))
    for p in params:
        x = layer(p, x)
    return x


def with_tied_weights(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, other: affine(p, x) @ other)
    for p in params:
        x = layer(p, x, params[0]["w"])
    return x


def with_stacked_weights(mark: Mark, params: Any, x: Tensor) -> Tensor:
    stacked, layer = {name: torch.stack([p[name] for p in params]) for name in params[0]}, mark(affine)
    for index in range(len(params)):
        x = layer({name: weight[index] for name, weight in stacked.items()}, x)
    return x


def without_gradients_in_part(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale: Tensor = x.norm()
        return affine(p, x).div(scale)

    for p in params:
        x = layer(p, x)
    return x


def under_autocast(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: affine(p, x.float().to(x.dtype)).float() @ p["w"].float())
    for p in params:
        with torch.autocast("cpu", torch.bfloat16):
            x = x + layer(p, x).double()
    return x


def nested(mark: Mark, params: Any, x: Tensor) -> Tensor:
    inner = mark(lambda p, x: affine(p, x))
    layer = mark(lambda p, x: inner(p, inner(p, x)))
    for p in params:
        x = layer(p, x)
    return x


def recomputed(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: fp.recompute(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w))(p["w"], affine(p, x)))
    for p in params:
        x = layer(p, x)
    return x


def reshaped(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: affine(p, x).reshape(-1, 2).T.contiguous().T.reshape(x.shape))
    for p in params:
        x = layer(p, x)
    return x


def with_a_body(mark: Mark, params: Any, x: Tensor) -> Tensor:
    body = fp.shard_map(torch.sin, MESH, in_specs=P("data"), out_specs=P("data"))
    layer = mark(lambda p, x: body(affine(p, x)) + fp.constrain(x, P("data")))
    for p in params:
        x = layer(p, x)
    return x


TWICE = {"nested", "parts_that_are_written"}  # models with two affine maps in each layer
SHARED: dict[str, tuple[Loss, int]] = {
    each.__name__: (each, runs)
    for each, runs in (
        *((plain, 2), (with_keywords, 2), (with_a_shared_mask, 2), (with_several_results, 2)),
        *((results_that_share_memory, 2), (with_writes_inside, 2), (with_constants, 2)),
        *((with_tied_weights, 3), (with_stacked_weights, 2), (without_gradients_in_part, 2), (under_autocast, 2)),
        *((parts_that_are_written, 4), (with_dataclasses, 2), (nested, 2), (recomputed, 2), (reshaped, 2)),
    )
}


def recorded(loss: Callable[..., Any], *args: Any) -> tuple[list[str], int]:
    """Ops of a trace with their source lines and regions, and the number of layers that were run for it."""
    leaves, tree = optree.tree_flatten(args)
    calls: list[CodeType] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    try:
        traced = trace(lambda *xs: [loss(*tree.unflatten(xs))], [*map(aval_of, leaves)], forward_only=True)
    finally:
        sys.setprofile(None)
    names = [f"x{index}" for index in range(len(leaves))]
    regions: dict[str | None, int] = {}
    places = []
    for node in traced.nodes:
        source = info(node).source
        assert source is not None
        places.append(f"{source!r} {regions.setdefault(source.region, len(regions))} {source.stage}")
    return [*program_text(traced, Mesh(), names, ["result"]).splitlines(), *places], calls.count(ran.__code__)


def require_same_program(loss: Loss, runs: int, mark: Mark = fp.repeated, every: int = LAYERS) -> None:
    def marked(params: Any, x: Tensor) -> Tensor:
        return loss(mark, params, x).square().mean()

    args = parameters(), draw(4, WIDTH)
    with without_repeats():
        wanted, traced = recorded(marked, *args)
    found, shared = recorded(marked, *args)
    assert found == wanted
    assert (traced, shared) == (every, runs)


@pytest.mark.parametrize("name", SHARED)
def test_equal_calls_are_traced_once(name: str) -> None:
    require_same_program(*SHARED[name], every=2 * LAYERS if name in TWICE else LAYERS)


def with_stages(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: fp.stage_boundary(affine(p, x)) + 1)
    for p in params:
        x = layer(p, x)
    return x


def test_stages_are_numbered_on() -> None:
    require_same_program(with_stages, 2)


@pytest.mark.every(5)
@pytest.mark.parametrize("loss_of", [with_a_body, *(loss for loss, _ in SHARED.values())])
def test_programs_do_not_change(loss_of: Loss) -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        return loss_of(fp.repeated, params, x).square().mean()

    args, step = (parameters(), draw(4, WIDTH)), fp.grad_and_value(PLAN(loss))
    shared, alone = (fp.compile(step, MESH, without=without) for without in ((), "repeats"))
    assert str(shared.lower(*args)) == str(alone.lower(*args))
    gradients, value = shared(*args)
    assert optree.tree_all(optree.tree_map(torch.equal, (gradients, value), alone(*args)))


# --- Draws ---


def dropped(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        x = F.dropout(affine(p, x), 0.5)
        return x + fp.random.normal(fp.random.next_key(), x)

    for p in params:
        x = fp.random.dropout(layer(p, x), 0.25)
    return x


def dropped_by_an_own_key(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return F.dropout(affine(p, F.dropout(x, 0.5)), 0.5)

    for number, p in enumerate(params):
        x = layer(p, x, fp.random.fold_in(fp.random.key(3), number))
    return x


def dropped_in_a_body(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The number of its site is a constant of another trace."""
    body = fp.shard_map(lambda x: F.dropout(x, 0.5), MESH, in_specs=P("data"), out_specs=P("data"))
    layer = mark(lambda p, x: body(affine(p, x)))
    for p in params:
        x = layer(p, x)
    return x


def test_a_call_that_draws_in_a_body_is_traced() -> None:
    def drawn(params: Any, x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return dropped_in_a_body(fp.repeated, params, x).square().mean()

    args, plan = (parameters(), draw(4, WIDTH), fp.random.key(1)), fp.data_parallel("data", batch=(P("data"), P()))
    shared, alone = (fp.compile(plan(drawn), MESH, without=without) for without in ((), "repeats"))
    assert str(shared.lower(*args)) == str(alone.lower(*args))


@pytest.mark.parametrize("loss", [dropped, dropped_by_an_own_key])
def test_each_call_draws_for_itself(loss: Loss) -> None:
    def drawn(params: Any, x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return loss(fp.repeated, params, x).square().mean()

    args = parameters(), draw(4, WIDTH), fp.random.key(1)
    with without_repeats():
        wanted, _ = recorded(drawn, *args)
    found, runs = recorded(drawn, *args)
    assert found == wanted and runs == 2
