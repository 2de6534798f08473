"""Marks are the identity in every derivative, and what a trace records of them is their op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_parallel.checker import argument_checks
from functional_parallel.ir import aval_of, info
from functional_parallel.ir.stand_ins import differentiable_form
from functional_parallel.ops.constrain import OP as CONSTRAIN
from functional_parallel.ops.constrain import _Constrain, constrain_rest
from functional_parallel.tracing import trace

X = torch.arange(6.0, dtype=torch.float64).view(2, 3)
MARKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constrain": lambda x: _Constrain.apply(x, ["data"], [0], [1]),
    "declared": lambda x: argument_checks._Declared.apply(x, ["data"], ["varying"], "0", "P('data')", "f"),
}
OPS = {"constrain": CONSTRAIN, "declared": argument_checks.OP}


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_is_the_identity(name: str) -> None:
    mark = MARKS[name]
    assert torch.equal(mark(X), X) and mark(X) is not X

    def cubes(x: torch.Tensor) -> torch.Tensor:
        return mark(x * x * x).sum()

    assert torch.equal(torch.func.grad(cubes)(X), 3 * X * X)
    assert torch.equal(torch.func.grad(lambda x: torch.func.grad(cubes)(x).sum())(X), 6 * X)
    assert torch.equal(torch.func.jvp(lambda x: mark(x * x), (X,), (X,))[1], 2 * X * X)
    y = X.clone().requires_grad_()
    cubes(y).backward()
    assert torch.equal(y.grad, 3 * X * X)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("name", MARKS)
def test_a_mark_under_vmap(name: str, in_dim: int) -> None:
    """Dims that a mark names keep their numbers: the mapped dim goes behind them."""
    mark, shapes = MARKS[name], []
    wanted = X.movedim(in_dim, 0)
    assert torch.equal(torch.func.vmap(mark, in_dim)(X), wanted)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: mark(x * x).sum()), in_dim)(X), 2 * wanted)
    for node in trace(lambda x: [torch.func.vmap(mark, in_dim)(x)], [aval_of(X)]).nodes:
        if node.target is OPS[name]:
            shapes.append(info(node).aval.shape)
    assert shapes == [tuple(X.movedim(in_dim, -1).shape) if name == "constrain" else tuple(X.shape)]


@pytest.mark.parametrize("name", MARKS)
def test_a_trace_records_the_op_and_its_stand_in(name: str) -> None:
    nodes: list[Any] = [node for node in trace(lambda x: [MARKS[name](x)], [aval_of(X)]).nodes]
    assert [node.target for node in nodes if node.op == "call_function"] == [OPS[name]]
    assert (
        differentiable_form(OPS[name]) is {"constrain": constrain_rest, "declared": argument_checks._check_mark}[name]
    )
