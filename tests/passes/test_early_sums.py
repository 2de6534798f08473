"""Gradients are summed over ranks when they are complete, in every precision, so that few are alive at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import functional_parallel as fp
from functional_parallel.ir import Role, first_operand, info, operands_of, primitive_name
from functional_parallel.program import Program, StorageTable
from sharding_specs import Mesh

from ..some_cases import one_in

LAYERS, WIDTH, RANKS = 4, 32, 4
PRECISIONS: dict[str, list[Any]] = {
    "fp32": [],
    "bf16": [fp.mixed_precision("bf16")],
    "bf16 sums": [fp.mixed_precision("bf16", reduce="bf16")],
    "no masters": [fp.mixed_precision("bf16", masters=False)],
}
SCHEDULES: dict[str, list[Any]] = {
    "one batch": [],
    "accumulate": [fp.accumulate(2)],
    "each": [fp.accumulate(2, reduce="each")],
    "pipeline": [fp.pipeline("pipe", microbatches=2)],
}
SUMS = ("psum", "psum_scatter")


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in range(LAYERS):
        x = torch.relu(x @ params["w"][layer]) @ params["v"][layer]
    return x.square().mean()


def lowered(stage: int, precision: str, schedule: str, stacked: bool, width: int = WIDTH) -> list[Program]:
    """The programs of a training step."""
    plan = fp.chain(*PRECISIONS[precision], fp.zero(stage, "data"), *SCHEDULES[schedule])
    mesh = Mesh(data=RANKS, **({"pipe": 2} if schedule == "pipeline" else {}))
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, bucket=None)
    shape = (width, width)
    params: Any = {name: [torch.ones(shape) for _ in range(LAYERS)] for name in "wv"}
    if stacked:
        params = {name: torch.stack(layers) for name, layers in params.items()}
    train.lower(params, torch.ones(4 * RANKS, width))
    return train.program.every_program() if schedule == "pipeline" else [train.program]


def is_moved(node: fx.Node) -> bool:
    """Whether an op only moves or casts a gradient, or adds two whole ones; not if it computes one and adds it."""
    products = node.target is torch.ops.aten.add.Tensor and not any(map(is_of_a_layer, operands_of(node)))
    return (len(operands_of(node)) == 1 or products) and info(node).role is Role.GRADIENT


def is_of_a_layer(node: fx.Node) -> bool:
    """Whether a gradient of stacked layers is zero but for one layer, or the sum of such gradients."""
    if node.target is torch.ops.aten.add.Tensor:
        return any(map(is_of_a_layer, operands_of(node)))
    return node.target is torch.ops.aten.select_backward.default


def sums_of_gradients(program: Program) -> list[fx.Node]:
    return [n for n in program.traced.nodes if primitive_name(n) in SUMS and info(n).role is Role.GRADIENT]


@one_in(11, stage=[0, 1, 2, 3], precision=PRECISIONS, schedule=SCHEDULES, stacked=[False, True], width=[32, 33])
def test_a_gradient_is_summed_when_it_is_complete(
    stage: int, precision: str, schedule: str, stacked: bool, width: int
) -> None:
    """Between the product that completes a gradient and its sum, gradients are only cast, moved, padded and added."""
    sums = 0
    for program in lowered(stage, precision, schedule, stacked, width):
        order = list(program.traced.graph.nodes)
        number = {node: index for index, node in enumerate(order)}
        for total in sums_of_gradients(program):
            gradient = first_operand(total)
            while is_moved(gradient):
                gradient = max(operands_of(gradient), key=number.__getitem__)
            between = order[number[gradient] + 1 : number[total]]
            late = [node for node in between if node.op == "call_function" and info(node).role is not Role.GRADIENT]
            assert not late, (total, late)
            sums += 1
    assert sums >= (2 if stacked else 2 * LAYERS)


def most_alive(program: Program) -> int:
    """The largest number of full gradients that are alive at once."""
    table = StorageTable("", program.traced)
    full = [storage for storage in table.spans if info(storage[0]).nbytes >= 2 * WIDTH * WIDTH]
    spans = [table.spans[storage] for storage in full if table.kind(storage) == "gradients"]
    return max(sum(born <= at <= dies for born, dies in spans) for at in range(len(table.nodes)))


@one_in(3, stage=[1, 2, 3], precision=PRECISIONS)
def test_few_full_gradients_are_alive_at_once(stage: int, precision: str) -> None:
    """A product, its cast and the operand of its scatter; not those of all layers, as when casts come last."""
    (program,) = lowered(stage, precision, "one batch", stacked=False)
    assert most_alive(program) <= 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_have_the_type_that_the_plan_asks_for(precision: str) -> None:
    (program,) = lowered(2, precision, "one batch", stacked=False)
    wanted = torch.bfloat16 if precision in ("bf16 sums", "no masters") else torch.float32
    assert {info(node).aval.dtype for node in sums_of_gradients(program) if info(node).aval.ndim} == {wanted}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("width", [32, 33])
def test_dims_that_the_axis_does_not_divide_are_bucketed(stage: int, width: int) -> None:
    """One collective for all gradients, and one for all new values, as of even dims."""
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=RANKS), fp.zero(stage, "data"), bucket=1 << 25)
    params = {name: [torch.ones(width, width) for _ in range(LAYERS)] for name in "wv"}
    counts = train.lower(params, torch.ones(2 * RANKS, width)).counts()
    assert counts["psum_scatter", ("data",)] == 1
    if stage < 3:
        assert counts["all_gather", ("data",)] == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_roles_are_found_where_no_output_needs_the_forward(precision: str) -> None:
    """The gradient of a linear function does not depend on its value, so its forward is erased."""
    plan = fp.chain(*PRECISIONS[precision], fp.zero(0, "data"))
    step = fp.compile(fp.grad(plan(lambda w, x: (w * x).sum())), Mesh(data=2), bucket=None)
    program = step.lower(torch.zeros(4), torch.ones(2, 4))
    assert len(sums_of_gradients(program)) == program.counts()["psum", ("data",)] == 1
