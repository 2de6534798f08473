"""Numbers that torch's vmap turns into tensors, in the function of a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import aval_of
from functional_parallel.tracing import trace
from sharding_specs import Mesh

W, X, Y = (torch.arange(float(n)).double().reshape(-1, 3) % 5 - 2 for n in (9, 12, 15))

ONES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda w, x: (x @ w).square().sum() / 2,
    "reciprocal": lambda w, x: 1 / (1 + (x @ w).square().sum()),
    "sum": lambda w, x: (x @ w)[0] * 2 + 1,
    "chosen": lambda w, x: torch.where((x @ w).sum() > 0, (x @ w).sum(), 0.0) / 4,
    "power": lambda w, x: (1 + (x @ w).square().sum()) ** 1.5,
}


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.accumulate(2)], ids=repr)
@pytest.mark.parametrize("name", ONES)
@pytest.mark.every(2)
def test_a_contraction_of_mapped_gradients(name: str, plan: fp.Transform) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        each = torch.func.vmap(torch.func.grad(ONES[name]), in_dims=(None, 0))(w, x)
        return torch.einsum("bij,bij->", each, each) + (each.flatten(1).T @ x).square().sum()

    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), W, X)


def test_a_number_keeps_its_value_and_dtype() -> None:
    """It is one of float64, although the default is float32."""
    f = torch.func.vmap(lambda x: x.sum() / 3 + 0.1)
    (node,) = (each for each in trace(lambda x: [f(x)], [aval_of(X)]).nodes if "full" in str(each.target))
    assert node.args == ([], 3) and node.kwargs["dtype"] is torch.float64
    assert torch.equal(fp.compile(fp.data_parallel("data")(lambda w, x: f(x)), Mesh(data=2))(W, X), f(X))
