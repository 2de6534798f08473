"""On a CUDA device, where there is one: keyed draws have the bits of the CPU's, by Triton's kernel and without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.draws import kernels
from sharding_specs import Mesh, P

from ..draws.test_kernels import DTYPES, KEYS, PROBABILITIES, Shard, check, on_a_rank, shards

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@settings(max_examples=30, deadline=None)
@given(
    shard=shards(),
    dtype=st.sampled_from(DTYPES),
    keys=KEYS,
    p=st.sampled_from(PROBABILITIES),
    triton=st.sampled_from([False, True] if importlib.util.find_spec("triton") else [False]),
)
def test_every_draw_has_the_bits_of_the_cpu(
    shard: Shard, dtype: torch.dtype, keys: list[int], p: float, triton: bool
) -> None:
    def on_cuda(seeds: torch.Tensor, size: Any, sizes: Any, strides: Any, tables: Any, *kind: Any) -> torch.Tensor:
        return kernels.drawn(seeds.cuda(), size, sizes, strides, [table.cuda() for table in tables], *kind).cpu()

    with pytest.MonkeyPatch.context() as patch:
        on_a_rank(patch, shard)
        patch.setattr(kernels, "_has_triton", lambda: triton)
        check(shard, dtype, keys, p, on_cuda)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_and_its_gradient(dtype: torch.dtype) -> None:
    def loss(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (fp.random.dropout(x, 0.1, key=key) ** 2).sum()

    key = fp.random.key(3)
    x = torch.randn(257, 1030, dtype=dtype)
    plan = fp.data_parallel("data", batch=P())
    for mesh in (Mesh(data=1), Mesh(data=2)):
        step = fp.compile(fp.grad(plan(loss)), mesh)
        found, wanted = step(x.cuda(), key.cuda()), step(x, key)
        assert torch.equal(found.cpu() == 0, wanted == 0)
        torch.testing.assert_close(found.cpu(), wanted)
