"""What a pipeline sends: messages between stages, a tied weight's gradient once a step, and no collective more."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, split

from .networks import normal, tied_table

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

SUMS = ("psum", "psum_scatter")


def tanh_layers(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.every(3)
def test_no_more_collectives_than_without(schedule: str, tied: bool) -> None:
    """Per microbatch those of the function itself: none twice for the split backward, none whose result is not used."""
    config = gpt.Config(2 if schedule == "zb-v" else 1, 16, 2, 8, tied=tied)
    params, specs = split(gpt.init(config, 0))
    loss, tokens = partial(gpt.loss, config=config), torch.randint(0, 256, (4, 9))
    tensor = fp.tensor_parallel("tensor", specs)
    whole = fp.compile(fp.grad_and_value(tensor(loss)), Mesh(tensor=2)).lower(params, tokens[:2]).counts()
    plan = fp.chain(tensor, fp.pipeline("pipe", schedule=schedule, microbatches=2))
    found = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, tensor=2)).lower(params, tokens).counts()
    assert {key: count for key, count in found.items() if key[0] != "send"} == {k: 2 * n for k, n in whole.items()}


def test_sequence_parallel_inside() -> None:
    """The residual stream is split over time where it crosses a cut, so half is sent; the gradients are the model's."""
    config = gpt.Config(1, 16, 2, 8, tied=True)
    params, specs = split(gpt.init(config, 0))
    params = optree.tree_map(lambda leaf: leaf.double(), params)
    tokens = torch.randint(0, 256, (4, 9))
    wanted = fp.grad_and_value(partial(gpt.loss, config=config))(params, tokens)
    sent = {}
    for sequence in (False, True):
        loss = partial(gpt.loss, config=replace(config, sequence_parallel=sequence))
        plan = fp.chain(fp.tensor_parallel("tensor", specs), fp.pipeline("pipe", microbatches=2))
        step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, tensor=2))
        for a, b in zip(optree.tree_leaves(step(params, tokens)), optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        sent[sequence] = sum(info(node).aval.nbytes for node in step.program.stages[0].sends_forward)
    assert 0 < sent[True] <= sent[False] // 2


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_tied_weight_is_never_sent_and_its_gradient_once(microbatches: int) -> None:
    """The table lives on the first rank and the last; each sends the other its sum, whatever the microbatches."""
    params = {"table": normal(30, 4), "layers": [normal(4, 4) for _ in range(4)]}
    plan = fp.pipeline("pipe", microbatches=microbatches)
    train = fp.train_step(tied_table, fp.optim.adamw(0.1), Mesh(pipe=4), plan, clip=1.0)
    train(train.init(params), torch.randint(0, 30, (16,)))
    sent = Counter(tuple(one.operand.shape) for one in train.program.collectives())
    assert sent[30, 4] == 2
    assert sent[16 // microbatches, 4] == 2 * 3 * microbatches
    assert all(len(shape) < 2 or shape[1] == 4 for shape in sent)
    exchanged = [each for level in train.program.epilogue.exchanges for each in level if info(each.node).aval.ndim]
    assert {(each.source, each.target) for each in exchanged} == {(0, 3), (3, 0)}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule, clip", [("gpipe", None), ("1f1b", 1.0), ("zb-v", None)])
@pytest.mark.every(3)
def test_gradients_are_summed_in_buckets_at_the_end(zero: int, schedule: str, clip: float | None) -> None:
    """One sum on each rank of the pipeline, of all its gradients: the same bytes, the same bits."""
    params = [{"w": normal(8, 8), "b": normal(8)} for _ in range(4)]
    plan = fp.chain(fp.zero(zero, "data"), fp.pipeline("pipe", schedule=schedule, microbatches=2))
    batch, sent, found, results = normal(16, 8), [], [], []
    for bucket in (None, "auto"):
        train = fp.train_step(tanh_layers, fp.optim.adamw(0.1), Mesh(pipe=2, data=2), plan, clip=clip, bucket=bucket)
        program = train.lower(train.init(params), batch)
        found.append([each.operand.numel for each in program.collectives() if each.kind in SUMS and each.operand.shape])
        sent.append(program.bytes_sent())
        results.append(train.whole(train(train.init(params), batch)[0]))
    assert sent[0] == sent[1]
    assert sorted(found[0]) == [8] * 4 + [64] * 4
    assert found[1] == [2 * 72] * 2
    for plain, bucketed in zip(*map(optree.tree_leaves, results), strict=True):
        assert torch.equal(plain, bucketed)


def test_the_global_batch_is_printed() -> None:
    plan = fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", microbatches=32))
    step = fp.compile(fp.grad_and_value(plan(lambda w, x: (torch.tanh(x @ w) ** 2).mean())), Mesh(pipe=1, data=4))
    text = str(step.explain(torch.empty(3, 3), torch.empty(1024, 3)))
    assert "a batch of 1024 = 8 per microbatch · 32 microbatches · 4 data ranks" in text
