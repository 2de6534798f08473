"""Each private torch API in `functional_parallel/_torch/writes.py` does what the library relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from functional_parallel import _torch

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda p: p.data.mul_(2),
    "of a view": lambda p: p.detach()[0].zero_(),
    "by index": lambda p: p.data.__setitem__(0, 7.0),
    "storage": lambda p: p.untyped_storage().fill_(0),
    "numpy": lambda p: p.detach().numpy().fill(3),
    "other memory": lambda p: setattr(p, "data", torch.zeros(2, 3)),
    "set_": lambda p: torch.no_grad()(p.set_)(torch.zeros(2, 3)),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(2, 3))),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
    "of an optimizer": lambda p: (p.sum().backward(), torch.optim.SGD([p], 0.1).step()),
}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "op": lambda p: p + 1,
    "clone": lambda p: p.clone(),
    "backward": lambda p: (p * 2).sum().backward(),
    "text": repr,
    "item": lambda p: p[0, 0].item(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_written_tensor_moves_while_a_lazy_clone_is_alive(write: str) -> None:
    p = nn.Parameter(torch.rand(2, 3))
    kept, before, values = _torch.lazy_clone(p), _torch.address(p), p.detach().clone()
    assert kept is not None and _torch.address(kept) == before, "it takes no memory"
    WRITES[write](p)
    assert _torch.address(p) != before and torch.equal(kept, values)


@pytest.mark.parametrize("read", READS)
def test_a_tensor_that_is_read_stays(read: str) -> None:
    p = nn.Parameter(torch.rand(2, 3))
    kept, before = _torch.lazy_clone(p), _torch.address(p)
    READS[read](p)
    assert kept is not None and _torch.address(p) == before


def test_without_the_clone_a_write_stays_in_its_memory() -> None:
    p = nn.Parameter(torch.rand(2, 3))
    kept, before = _torch.lazy_clone(p), _torch.address(p)
    del kept
    p.data.mul_(2)
    assert _torch.address(p) == before


def test_memory_that_cannot_be_shared_has_no_clone() -> None:
    assert _torch.lazy_clone(torch.from_numpy(np.ones(3))) is None
    assert _torch.lazy_clone(torch.ones(3).share_memory_()) is None
    assert _torch.address(torch.ones(3, device="meta")) == 0 == _torch.address(torch.eye(3).to_sparse())
