"""Grouped products on a CUDA device: by torch's kernel, or where that refuses the rows' alignment group by group."""

from __future__ import annotations

import optree
import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from sharding_specs import Mesh, P

from .training import needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("columns", [24, 10], ids=["aligned", "not aligned"])
def test_grouped_products_on_the_device(columns: int) -> None:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    rows, matrices = torch.randn(8, 16), torch.randn(3, 16, columns)
    gradient = fp.grad_and_value(lambda a, b, ends: (F.grouped_mm(a, b, offs=ends) ** 2).sum(), (0, 1))
    step = fp.compile(gradient, Mesh(), in_specs=(P(), P(), P()), out_specs=P())
    on_device = optree.tree_leaves(step(rows.cuda(), matrices.cuda(), ends.cuda()))
    for found, want in zip(on_device, optree.tree_leaves(step(rows, matrices, ends)), strict=True):
        torch.testing.assert_close(found.cpu(), want, rtol=1e-2, atol=1e-2)
