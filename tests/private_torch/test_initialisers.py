"""Each private torch API in `functional_parallel/_torch/initialisers.py` does what the library relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from functional_parallel import _torch


def test_the_initialiser_that_looks_at_values_is_asked_for_by_name() -> None:
    calls = []

    def call(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(tensor.shape))
        return function(tensor, *args, **kwargs)

    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.empty(50, 4), std=1.0, a=-1.0, b=1.0)
    torch.manual_seed(0)
    with _torch.inits_by(call):
        found = nn.init.trunc_normal_(torch.empty(50, 4), std=1.0, a=-1.0, b=1.0)
    assert calls == [(50, 4)] and torch.equal(found, expected)
    nn.init.trunc_normal_(torch.empty(50, 4))
    assert len(calls) == 1


def test_the_generator_that_ops_draw_from() -> None:
    generator = _torch.default_generator(torch.device("cpu"))
    assert generator is torch.default_generator
    state = generator.get_state()
    drawn = torch.rand(3)
    generator.set_state(state)
    assert torch.equal(torch.rand(3), drawn)
    assert _torch.default_generator(torch.device("meta")) is None
