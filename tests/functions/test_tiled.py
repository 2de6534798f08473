"""A linear layer in tiles is the layer in one piece, and a rank gathers one of its tiles at a time."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import given, settings

import functional_parallel as fp
from sharding_specs import Mesh


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.lists(st.integers(1, 3), max_size=2), st.booleans(), st.data())
def test_values_and_gradients_are_those_of_the_layer_in_one_piece(
    outputs: int, inputs: int, leading: list[int], has_bias: bool, data: Any
) -> None:
    weight, bias = integers(outputs, inputs), integers(outputs, seed=1) if has_bias else None
    x, seed = integers(*leading, inputs, seed=2), integers(*leading, outputs, seed=3)
    counts = {"outputs": data.draw(st.integers(1, outputs)), "inputs": data.draw(st.integers(1, inputs))}
    *of_bias, of_weight, of_x, value = differentiated(
        lambda layer, x: torch.nn.functional.linear(x, layer["weight"], layer.get("bias")),
        {"weight": weight} | ({} if bias is None else {"bias": bias}), x, seed,
    )  # fmt: skip
    found = differentiated(lambda tiles, x: fp.tiled(x, tiles), fp.into_tiles(weight, bias, **counts), x, seed)
    expected = fp.into_tiles(of_weight, *of_bias, **counts)
    torch.testing.assert_close(found, [*optree.tree_leaves(expected), of_x, value], rtol=0, atol=0)


def differentiated(f: Any, layer: Any, x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the layer and of x, and the value."""
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves((layer, x))]
    value = f(layer, x)
    return [*torch.autograd.grad((value * seed).sum(), leaves), value.detach()]


def layers(tiles: int) -> dict[str, Any]:
    weight, bias = integers(64, 32), integers(64, seed=1)
    return {"up": fp.into_tiles(weight, bias, outputs=tiles, inputs=tiles), "down": integers(64, 2, seed=2)}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(fp.tiled(x, params["up"])) @ params["down"]).square().sum()


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_zero_3_holds_one_tile_at_a_time(tiles: int) -> None:
    mesh, plan, x = Mesh(data=2), fp.zero(3, "data", prefetch=0), integers(4, 32, seed=4)
    fp.testing.assert_equivalent(loss, plan, mesh, layers(tiles), x)
    program = fp.compile(plan(loss), mesh).lower(layers(tiles), x)
    assert program.counts()["all_gather", ("data",)] == tiles**2 + tiles + 1  # weights, biases, the next layer
    assert program.memory().alive["gathered"] == 64 * 32 * 8 // tiles**2


def test_numbers_of_tiles_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"into_tiles\(inputs=4\): the weight has 3 inputs, so 1 to 3 tiles"):
        fp.into_tiles(torch.ones(2, 3), inputs=4)


def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight of shape \(4, 6\) and a bias of shape \(2,\); a linear layer has"):
        fp.into_tiles(torch.ones(4, 6), torch.ones(2), outputs=2)
    with pytest.raises(ValueError, match=r"outputs=2\.0"):
        fp.into_tiles(torch.ones(4, 6), outputs=2.0)  # type: ignore[arg-type]
