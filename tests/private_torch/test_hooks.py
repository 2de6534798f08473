"""Each private torch API in `functional_parallel/_torch/hooks.py` does what the library relies on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from functional_parallel import _torch


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_are_found(when: str) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    for register in (
        getattr(optimizer, f"register_step_{when}_hook"),
        getattr(of_optimizers, f"register_optimizer_step_{when}_hook"),
    ):
        assert not _torch.has_step_hooks(optimizer)
        hook = register(lambda *_: None)
        assert _torch.has_step_hooks(optimizer)
        hook.remove()
    assert not _torch.has_step_hooks(optimizer)


def found(hooks: Iterator[tuple[str, str, dict[int, Any]]]) -> list[tuple[str, str]]:
    return [(path, kind) for path, kind, each in hooks if each]


def test_hooks_of_modules_and_parameters_are_found() -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    assert not found(_torch.forward_hooks(net)) and not found(_torch.gradient_hooks(net))
    clean = _torch.flags_of_parameter(net[0].weight)
    net[0].register_forward_hook(print)
    net.register_forward_pre_hook(print)
    assert found(_torch.forward_hooks(net)) == [("", "forward pre-hook"), ("0", "forward hook")]
    net[0].register_full_backward_hook(print)
    net.register_full_backward_pre_hook(print)
    net[0].weight.register_hook(print)
    net[0].bias.register_post_accumulate_grad_hook(print)
    assert found(_torch.gradient_hooks(net)) == [
        ("", "backward pre-hook"),
        ("0", "backward hook"),
        ("0.weight", "gradient hook"),
        ("0.bias", "post-accumulate-grad hook"),
    ]
    assert _torch.flags_of_parameter(net[0].weight) != clean and clean[0] is True


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_are_found(kind: str) -> None:
    look = _torch.gradient_hooks if "backward" in kind else _torch.forward_hooks
    handle = getattr(of_modules, f"register_module_{kind}_hook")(print)
    try:
        assert [path for path, _ in found(look(nn.Linear(1, 1)))] == ["every module"]
    finally:
        handle.remove()
