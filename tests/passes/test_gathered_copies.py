"""ZeRO-3 over one to three axes: number of gathers, and gathered copies alive at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, P

from .networks import SPLIT, batch, integer_loss, parameters

WIDTH = 24
SIZES = {"data": 4, "shard": 2, "replica": 2, "third": 3}


def plan_over(axes: tuple[str, ...], **options: Any) -> Any:
    return fp.chain(*(fp.zero(3, axis, **options) for axis in axes))


def mesh_of(axes: tuple[str, ...]) -> Mesh:
    return Mesh({axis: SIZES[axis] for axis in axes})


def product(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = torch.relu(x @ w.reshape(WIDTH, WIDTH))
    return x.square().mean()


def square_layers(count: int) -> Any:
    """A weight for each layer, with three dims, so that three axes can split it."""
    return {"layers": [torch.randn(6, WIDTH // 6, WIDTH, dtype=torch.float64) for _ in range(count)]}


def lifetimes(program: Any) -> list[tuple[tuple[str, ...], bool, int, int]]:
    """Per gather that completes a parameter: the parameter, whether the backward reads it, first and last position."""
    position = {node: index for index, node in enumerate(program.traced.graph.nodes)}
    found = []
    for node in program.traced.nodes:
        if "all_gather" not in str(node.target) or any("all_gather" in str(user.target) for user in _readers(node)):
            continue
        last = max(position[user] for user in _readers(node))
        found.append((info(node).parameters, bool(info(node).backward), position[node], last))
    return found


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The ops that read a gathered value, through casts and transposes."""
    found = []
    for user in node.users:
        found.append(user)
        if user.target in (torch.ops.aten.t.default, torch.ops.aten.view.default) or "pcast" in str(user.target):
            found += _readers(user)
    return found


def gathers(program: Any) -> dict[str, int]:
    return {axes[0]: count for (kind, axes), count in program.counts().items() if kind == "all_gather"}


AXES = st.sampled_from([("data",), ("shard", "replica"), ("replica", "shard"), ("third", "shard", "replica")])


@settings(max_examples=4)
@given(
    axes=AXES,
    layers=st.integers(1, 4),
    prefetch=st.integers(0, 3),
    microbatches=st.sampled_from([1, 3]),
)
def test_as_many_copies_as_promised(axes: tuple[str, ...], layers: int, prefetch: int, microbatches: int) -> None:
    """A copy for the layer that computes, one for each layer of `prefetch`, and never two of one parameter."""
    plan = fp.chain(plan_over(axes, prefetch=prefetch), fp.accumulate(microbatches))
    step = fp.compile(fp.grad(plan(product)), mesh_of(axes))
    program = step.lower(square_layers(layers), torch.randn(36, WIDTH).double())
    alive: Counter[int] = Counter()
    held: set[tuple[Any, int]] = set()
    for parameter, _, first, last in lifetimes(program):
        for position in range(first, last + 1):
            alive[position] += 1
            assert (parameter, position) not in held, "two gathered copies of one parameter are alive"
            held.add((parameter, position))
    assert 1 <= max(alive.values()) <= prefetch + 1
    assert gathers(program) == {axis: (2 * layers - 1) * microbatches for axis in axes}  # x needs no gradient


@pytest.mark.parametrize("axes", [("data",), ("shard", "replica")])
@pytest.mark.parametrize("layers", [3, 4])
def test_a_second_copy_is_gathered_as_soon_as_the_first_is_used(axes: tuple[str, ...], layers: int) -> None:
    """With no bound on layers ahead, no op is between, except gathers and views of other parameters."""

    def products(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = x @ w
        return x.square().mean()

    weights = [torch.randn(WIDTH, WIDTH).double() for _ in range(layers)]
    step = fp.compile(fp.grad(plan_over(axes, prefetch=layers)(products)), mesh_of(axes))
    program = step.lower(weights, torch.randn(8, WIDTH).double())
    nodes, ends, seconds = list(program.traced.graph.nodes), dict[Any, int](), 0
    for parameter, _, first, last in sorted(lifetimes(program), key=lambda each: each[2]):
        if parameter in ends:
            seconds += 1
            assert not any(node.target is torch.ops.aten.mm.default for node in nodes[ends[parameter] + 1 : first])
        ends[parameter] = last
    assert seconds == layers - 1


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_peak_is_that_of_one_axis(prefetch: int) -> None:
    """Two axes of 2 ranks hold the same as one of 4, and while a layer is gathered, half of it once more."""
    params, x, layer = square_layers(7), torch.randn(8, WIDTH).double(), WIDTH * WIDTH * 8
    one, two = (
        fp.compile(fp.grad(plan_over(axes, prefetch=prefetch)(product)), mesh_of(axes)).lower(params, x).memory().peak
        for axes in (("data",), ("shard", "replica"))
    )
    assert one <= two <= one + layer // 2


def test_what_the_inner_axis_keeps_is_gathered_once() -> None:
    params, x = square_layers(3), torch.randn(8, WIDTH).double()

    def counts(shard: bool, replica: bool, microbatches: int = 1) -> dict[str, int]:
        plan = fp.chain(
            fp.zero(3, "shard", keep_gathered=shard),
            fp.zero(3, "replica", keep_gathered=replica),
            fp.accumulate(microbatches),
        )
        step = fp.compile(fp.grad(plan(product)), Mesh(shard=2, replica=2))
        torch.testing.assert_close(step(params, x), fp.grad(product)(params, x))
        return gathers(step.program)

    assert counts(shard=False, replica=False) == {"shard": 5, "replica": 5}
    assert counts(shard=False, replica=True) == {"shard": 5, "replica": 3}  # the half that one gather made is kept
    assert counts(shard=True, replica=False) == {"shard": 3, "replica": 3}  # full copies are kept
    assert counts(shard=False, replica=True, microbatches=2) == {"shard": 10, "replica": 3}
    assert counts(shard=True, replica=False, microbatches=2) == {"shard": 3, "replica": 3}


STAGES = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@settings(max_examples=4)
@given(
    stages=STAGES,
    order=st.permutations(["shard", "replica"]),
    tensor=st.booleans(),
    pipe=st.booleans(),
    prefetch=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    keep=st.tuples(st.booleans(), st.booleans()),
    microbatches=st.sampled_from([1, 2]),
)
def test_gradients_are_exact(
    stages: list[int],
    order: list[str],
    tensor: bool,
    pipe: bool,
    prefetch: tuple[int, int],
    keep: tuple[bool, bool],
    microbatches: int,
) -> None:
    zeros = [
        fp.zero(stage, axis, keep_gathered=kept, prefetch=ahead)
        for stage, axis, kept, ahead in zip(stages, order, keep, prefetch, strict=True)
    ]
    last = fp.pipeline("pipe", microbatches=microbatches) if pipe else fp.accumulate(microbatches)
    plan = fp.chain(*([fp.tensor_parallel("tensor", SPLIT)] if tensor else []), *zeros, last)
    mesh = Mesh({"shard": 2, "replica": 2, "tensor": 2, **({"pipe": 2} if pipe else {})})
    fp.testing.assert_equivalent(
        integer_loss, plan, mesh, parameters(2, integers=True), *batch(8, integers=True), exact=True
    )


@pytest.mark.parametrize("axes", [("data",), ("shard", "replica")])
def test_each_microbatch_of_a_pipeline_gathers_for_forward_and_backward(axes: tuple[str, ...]) -> None:
    params, x = square_layers(4), torch.randn(16, WIDTH).double()
    plan = fp.chain(plan_over(axes), fp.pipeline("pipe", microbatches=2))
    step = fp.compile(fp.grad(plan(product)), Mesh({**mesh_of(axes).shape, "pipe": 2}))
    program = step.lower(params, x)
    assert gathers(program) == {axis: 2 * (2 * 4 - 1) for axis in axes}


def test_a_gather_over_the_tensor_axis_is_not_saved_either() -> None:
    """A product that needs a dim of its weight replicated gathers it over both axes, and again in the backward."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params["layers"]:
            x = torch.tanh(x @ torch.linalg.inv(w))
        return x.sum()

    params = {"layers": [torch.randn(8, 8).double() + 8 * torch.eye(8) for _ in range(3)]}
    plan = fp.chain(fp.tensor_parallel("tensor", {"layers/*": P("tensor")}), fp.zero(3, "data"))
    x = torch.randn(8, 8).double()
    step = fp.compile(fp.grad(plan(loss)), Mesh(data=2, tensor=2))
    torch.testing.assert_close(step(params, x), fp.grad(loss)(params, x))
    backward = {node for node in step.program.traced.nodes if info(node).backward}
    saved = [
        node
        for node in step.program.traced.nodes
        if "all_gather" in str(node.target) and node not in backward and backward.intersection(_readers(node))
    ]
    assert not saved
