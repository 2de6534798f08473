"""Products of one row each with the same matrix become one product, of equal value, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P


def projected(params: Any, heads: Tensor) -> Tensor:
    """A projection of the heads of an attention, (rows, heads, columns, dim), which torch does not fold."""
    joined = heads.transpose(1, 2)
    return torch.nn.functional.linear(joined.reshape(*joined.shape[:2], -1), params["w"])


def ops_of(program: Any) -> set[str]:
    return {str(node.target) for node in program.traced.nodes}


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    ways=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    columns=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 9),
)
def test_values_are_equal_on_every_mesh(
    sizes: tuple[int, int, int, int], ways: tuple[int, int], columns: int, seed: int
) -> None:
    (rows, heads, dim, outs), (data, tensor), draw = sizes, ways, torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randint(-3, 4, shape, generator=draw).double()  # noqa: E731
    x = make(rows * data, columns, heads * tensor, dim).transpose(1, 2)
    params = {"w": make(outs, heads * tensor * dim)}
    split = fp.tensor_parallel("tensor", {"w": P(None, "tensor")}, batch=(P(None, "tensor"),))
    step = fp.compile(fp.chain(split, fp.data_parallel("data"))(projected), Mesh(data=data, tensor=tensor))
    assert torch.equal(step(params, x), projected(params, x))
    assert step.program is not None
    if columns == 1:
        assert not ops_of(step.program) & {"aten.bmm.default", "aten.expand.default"}


@pytest.mark.parametrize(("columns", "op"), [(1, "aten.mm.default"), (2, "aten.bmm.default")])
def test_one_row_each_is_folded_and_several_are_not(columns: int, op: str) -> None:
    def f(params: Any, x: Tensor) -> Tensor:
        return x.bmm(params["w"].expand(len(x), -1, -1))

    program = fp.compile(fp.data_parallel("data")(f), Mesh(data=2)).lower(
        {"w": torch.ones(3, 5)}, torch.ones(4, columns, 3)
    )
    assert ops_of(program) & {"aten.mm.default", "aten.bmm.default"} == {op}
    matrices = fp.compile(fp.data_parallel("data")(f), Mesh(data=2)).lower(
        {"w": torch.ones(1, 3, 5)}, torch.ones(4, 1, 3)
    )
    assert "aten.bmm.default" in ops_of(matrices), "a batch of matrices of one member"


def test_gradients_are_equal() -> None:
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randint(-3, 4, (5, 8), generator=draw).double()}
    x = torch.randint(-3, 4, (4, 1, 2, 4), generator=draw).double().transpose(1, 2)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (projected(params, x) ** 2).sum()

    found = fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=2))(params, x)
    assert torch.equal(found["w"], torch.func.grad(loss)(params, x)["w"])
