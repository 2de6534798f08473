"""Programs are traced on contiguous fakes, and must run on tensors that lie otherwise in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P


def flattened(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=x.dtype) @ x.reshape(-1)


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.zero(3, "data")], ids=repr)
def test_transposed_arguments(plan: Callable[..., Any]) -> None:
    w, x = torch.arange(6.0).reshape(2, 3).T, torch.arange(8.0).reshape(2, 4).T
    loss = lambda w, x: (flattened(w) * (x.flatten() ** 2).sum()) + x.sum()  # noqa: E731
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), w, x, exact=True)


def test_a_cast_and_a_scatter_of_a_transposed_value() -> None:
    mesh, x = Mesh(i=2), torch.arange(24.0).reshape(4, 6)

    @fp.shard_map(mesh, in_specs=P(), out_specs=P("i"))
    def f(x: Tensor) -> Tensor:
        moved = fp.pvary(x.T, "i").reshape(-1)
        part = fp.pscatter(x.T, "i", dim=1).reshape(-1)
        return torch.cat([moved, part])

    parts = [torch.cat([x.T.reshape(-1), x.T[:, 2 * i : 2 * i + 2].reshape(-1)]) for i in range(2)]
    assert torch.equal(f(x), torch.cat(parts))
    assert torch.equal(torch.func.grad(lambda x: f(x).sum())(x), torch.full_like(x, 3))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_attention_of_what_a_sum_left_as_it_lay(backend: str) -> None:
    """Its kernels take every row for one piece of memory, and read what lies beside those that are none."""

    def loss(params: Any, tokens: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(tokens, params["table"])
        q, k, v = (params["qkv"] @ x.mT).reshape(8, 3, 2, 2, 5).mT.unbind(1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    generator = torch.Generator().manual_seed(0)
    params = {"table": torch.randn(6, 4, generator=generator), "qkv": torch.randn(12, 4, generator=generator)}
    params, tokens = {name: p.double() for name, p in params.items()}, torch.arange(40).reshape(8, 5) * 7 % 6
    plan = fp.tensor_parallel("tensor", {"table": P("tensor")})
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(tensor=2), backend=backend)
    found, value = step(params, tokens)
    wanted, whole = torch.func.grad_and_value(loss)(params, tokens)
    torch.testing.assert_close((value, found), (whole, wanted), rtol=1e-12, atol=1e-12)
