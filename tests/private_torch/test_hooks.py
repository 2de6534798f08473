"""Each private torch API in `functional_parallel/_torch/optimizers.py` does what the library relies on."""

from __future__ import annotations

import pytest
import torch

from functional_parallel import _torch


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_are_found(when: str) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    assert not _torch.has_step_hooks(optimizer)
    hook = getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
    assert _torch.has_step_hooks(optimizer)
    hook.remove()
    assert not _torch.has_step_hooks(optimizer)
