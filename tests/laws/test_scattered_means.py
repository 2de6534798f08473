"""Means over what an index puts together, as in graph networks: gradients are divided by counts, which are no sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

Put = Callable[[Tensor, Tensor, Tensor], Tensor]

PUTS: dict[str, Put] = {
    f"{name}, {'of all' if own else 'of others'}": put
    for own in (True, False)
    for name, put in {
        "scatter_reduce": lambda x, to, rows, own=own: x.scatter_reduce(
            0, to[:, None].expand(-1, rows.shape[1]), rows, "mean", include_self=own
        ),
        "index_reduce": lambda x, to, rows, own=own: x.index_reduce(0, to, rows, "mean", include_self=own),
    }.items()
}

PLANS: dict[str, Callable[[Any], tuple[Any, Mesh]]] = {
    "data": lambda batch: (fp.data_parallel("data", batch=batch), Mesh(data=2)),
    "zero 1": lambda batch: (fp.zero(1, "data", batch=batch), Mesh(data=2)),
    "zero 3": lambda batch: (fp.zero(3, "data", batch=batch), Mesh(data=4)),
    "microbatches": lambda batch: (fp.chain(fp.zero(1, "data", batch=batch), fp.accumulate(2)), Mesh(data=2)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("batch", [(P("data"), P()), (P(), P(None, "data"))], ids=["nodes", "edges"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PUTS)
def test_a_graph_network(name: str, plan: str, batch: Any) -> None:
    def loss(w: Tensor, nodes: Tensor, edges: Tensor) -> Tensor:
        h, (out_of, into) = torch.tanh(nodes @ w), edges
        return PUTS[name](h, into, h[out_of]).square().sum()

    generator = torch.Generator().manual_seed(0)
    w, nodes = (torch.randn(shape, generator=generator).double() for shape in ((4, 8), (8, 4)))
    edges = torch.randint(6, (2, 16), generator=generator)  # two nodes have none
    transform, mesh = PLANS[plan](batch)
    fp.testing.assert_equivalent(loss, transform, mesh, w, nodes, edges, rtol=1e-12)


def test_partial_sums_like_which_something_is_made() -> None:
    """In a body written by hand, where a sum over ranks is left to the next op."""
    mesh = Mesh(i=2)

    @fp.shard_map(mesh, in_specs=(P(reduced={"i"}), P("i")), out_specs=P())
    def f(w: Tensor, x: Tensor) -> Tensor:
        slope = fp.grad(lambda w: (w * x.sum()).square().sum())(w)  # Unreduced
        return fp.psum(slope, "i") * torch.ones_like(slope).sum()

    w, x = torch.tensor([1.0, 2.0]), torch.arange(4.0)
    assert torch.equal(f(w, x), 2 * w * (1 + 25) * 2)
