"""What a GPT sends, collective by collective: Megatron's counts (arXiv 1909.08053 §3, 2205.05198 §4)."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, split

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

LAYERS, EMBED, HEADS, TIME, BATCH, VOCABULARY = 2, 16, 4, 8, 4, 256


def model(sequence_parallel: bool = False, layers: int = LAYERS) -> tuple[Any, Any, Any, torch.Tensor]:
    config = gpt.Config(layers, EMBED, HEADS, TIME, sequence_parallel=sequence_parallel)
    params, specs = split(gpt.init(config, 0))
    params = optree.tree_map(torch.Tensor.double, params)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(0))
    return partial(gpt.loss, config=config), params, specs, tokens


def program(
    mesh: Mesh, plan: Any, sequence_parallel: bool = False, layers: int = LAYERS, without: tuple[str, ...] = ()
) -> Any:
    loss, params, _, tokens = model(sequence_parallel, layers)
    step = fp.compile(fp.grad_and_value(plan(loss)), mesh, without=without)
    want = fp.grad_and_value(loss)(params, tokens)
    for a, b in zip(optree.tree_leaves(step(params, tokens)), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    return step.program


@cache
def tensor_program(sequence_parallel: bool = False, layers: int = LAYERS, without: tuple[str, ...] = ()) -> Any:
    plan = fp.tensor_parallel("tensor", model(sequence_parallel, layers)[2])
    return program(Mesh(tensor=2), plan, sequence_parallel, layers, without)


ACTIVATION, TOKENS = (BATCH, TIME, EMBED), (BATCH * TIME,)


def test_the_whole_list_of_tensor_parallelism() -> None:
    """Four psums of an activation per layer; the embedding, the head, and the loss's three reductions."""
    found = Counter((one.kind, one.operand.numel, one.phase) for one in tensor_program().collectives())
    activation = BATCH * TIME * EMBED
    assert found == {
        ("psum", activation, "forward"): 2 * LAYERS + 1,  # attention's output, the MLP's output; the embedding
        ("psum", activation, "backward"): 2 * LAYERS + 1,  # their inputs; the head's input
        ("pmax", BATCH * TIME, "forward"): 1,  # the loss: the largest logit,
        ("psum", BATCH * TIME, "forward"): 2,  # the sum of exponentials, and the target's logit
    }


def test_no_collective_carries_logits() -> None:
    plan = fp.chain(fp.tensor_parallel("tensor", model(layers=1)[2]), fp.data_parallel("data"))
    for one in program(Mesh(data=2, tensor=2), plan, layers=1).collectives():
        assert one.operand.numel < BATCH * TIME * VOCABULARY // 4 or one.axes == ("data",)
        if one.axes == ("tensor",):
            assert VOCABULARY not in one.operand.shape and VOCABULARY // 2 not in one.operand.shape


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_four_psums_per_layer(layers: int) -> None:
    counts = tensor_program(layers=layers).counts()
    assert counts[("psum", ("tensor",))] == 4 * layers + 4


def test_bytes_are_the_formula() -> None:
    """2 (n−1)/n · bsh per psum, 4 per layer and one each for embedding and head, and the loss's 3 · bs."""
    element = 8
    per_rank = sum(one.bytes for one in tensor_program().collectives())
    expected = (4 * LAYERS + 2) * BATCH * TIME * EMBED * element + 3 * BATCH * TIME * element
    assert per_rank == expected  # 2 (n−1)/n is 1 for two ranks


def test_data_parallelism_sums_each_parameter_once() -> None:
    found = program(Mesh(data=2), fp.data_parallel("data"), layers=1)
    assert found.counts() == {("psum", ("data",)): len(optree.tree_leaves(model(layers=1)[1])) + 1}
    assert sum(one.operand.numel <= 2 for one in found.collectives()) == 1, "the loss: a sum and a count"


def test_sequence_parallelism() -> None:
    """Each psum of an activation becomes a psum_scatter and an all_gather of the same bytes together."""
    plain, found = tensor_program(), tensor_program(sequence_parallel=True, without=("gather again",))
    activation = BATCH * TIME * EMBED
    counts = Counter((one.kind, one.operand.numel, one.phase) for one in found.collectives())
    assert counts == {
        ("psum_scatter", activation, "forward"): 2 * LAYERS + 1,  # outputs of attention and MLP; the embedding
        ("all_gather", activation // 2, "forward"): 2 * LAYERS + 1,  # their inputs; the head's input
        ("psum_scatter", activation, "backward"): 2 * LAYERS + 1,  # the transposes of the gathers
        ("all_gather", activation // 2, "backward"): 2 * LAYERS + 1,  # the transposes of the scatters
        ("psum", EMBED, "backward"): 2 * LAYERS + 1,  # scales of norms, each of which sees a shard of the sequence
        ("pmax", BATCH * TIME, "forward"): 1,  # the loss, as without sequence parallelism
        ("psum", BATCH * TIME, "forward"): 2,
    }
    halves = [one.bytes for one in found.collectives() if one.kind in ("psum_scatter", "all_gather")]
    whole = [one.bytes for one in plain.collectives() if one.operand.numel == activation]
    assert sum(halves) == sum(whole) == 4 * (2 * LAYERS + 1) * activation * 8 // 2


def test_column_first_costs_less_than_row_first() -> None:
    """A column split needs nothing before the nonlinearity and one psum after the row split; the other way sums before
    the nonlinearity, on the wide side, and gathers between layers."""

    def mlp(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ params["w1"]) @ params["w2"]

    def two(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return mlp(params, mlp(params, x)).square().sum()

    params, x = {"w1": torch.randn(8, 16).double(), "w2": torch.randn(16, 8).double()}, torch.randn(4, 8).double()
    found = {}
    for name, specs in {
        "column first": {"w1": P(None, "tensor"), "w2": P("tensor")},
        "row first": {"w1": P("tensor"), "w2": P(None, "tensor")},
    }.items():
        step = fp.testing.assert_equivalent(two, fp.tensor_parallel("tensor", specs), Mesh(tensor=2), params, x)
        found[name] = step.program
    assert found["column first"].counts() == {("psum", ("tensor",)): 3}  # two forward, and one between, backward
    assert sum(found["row first"].counts().values()) > 3
    assert sum(found["column first"].bytes_sent().values()) < sum(found["row first"].bytes_sent().values())
