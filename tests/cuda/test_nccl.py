"""One rank under nccl computes the numbers of a simulated rank on the CPU, with and without a CUDA graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .training import needs_cuda, on_nccl, trained

pytestmark = needs_cuda


def ran(backend: str) -> list[torch.Tensor]:
    return trained("cuda", fp.zero(3, "data"), Mesh(data=1), backend=backend)


@pytest.mark.parametrize(("backend", "port"), [("eager", 29561), ("cudagraphs", 29562)])
def test_one_rank_under_nccl(backend: str, port: int) -> None:
    found = on_nccl(partial(ran, backend), port)
    for a, b in zip(found, trained("cpu", None, Mesh()), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-9, atol=1e-9)
