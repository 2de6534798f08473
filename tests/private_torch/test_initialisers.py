"""Each private torch API in `functional_parallel/_torch/initialisers.py` does what the library relies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from functional_parallel import _torch


class Asked(TorchFunctionMode):
    """Collects the initialisers that ask whether their tensor has memory, and says that it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., torch.Tensor], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        found = _torch.redrawing_initialiser(func)
        if found is None:
            return func(*args, **(kwargs or {}))
        self.calls.append(found)
        return True


def test_the_initialiser_that_looks_at_values_is_found_before_it_draws() -> None:
    """Also under another mode; and it can be called later."""
    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.empty(50, 4), std=1.0, a=-1.0, b=1.0)
    torch.manual_seed(0)
    with Asked() as asked, torch.device("cpu"):
        found = nn.init.trunc_normal_(torch.full((50, 4), 7.0), std=1.0, a=-1.0, b=1.0)
        assert not found.is_meta
    if not asked.calls:  # torch 2.11 transforms uniform draws, and reads no value
        assert torch.equal(found, expected)
        return
    assert torch.equal(found, torch.full((50, 4), 7.0))
    ((function, given),) = asked.calls
    function(**given)
    assert torch.equal(found, expected)


def test_the_generator_that_ops_draw_from() -> None:
    generator = _torch.default_generator(torch.device("cpu"))
    assert generator is torch.default_generator
    state = generator.get_state()
    drawn = torch.rand(3)
    generator.set_state(state)
    assert torch.equal(torch.rand(3), drawn)
    assert _torch.default_generator(torch.device("meta")) is None
