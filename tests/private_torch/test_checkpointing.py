"""Each private torch API in `functional_parallel/_torch/checkpointing.py` does what the library relies on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint

from functional_parallel import _torch


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_looks_up_the_two_names_that_are_replaced(reentrant: bool) -> None:
    """Models hold references to torch.utils.checkpoint.checkpoint, so it must find these when it is called."""
    regions: list[str] = []

    @contextmanager
    def region(name: str) -> Iterator[None]:
        regions.append(name)
        yield

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant)

    with _torch.checkpointing(region):
        assert torch.equal(torch.func.grad(lambda x: call(x).sum())(torch.ones(2)), torch.ones(2).cos())
    assert regions == ["checkpoint"]
    x = torch.ones(2, requires_grad=True)
    call(x).sum().backward()
    assert x.grad is not None and regions == ["checkpoint"]
