"""Hooks of modules, tensors and optimizers. torch has functions that register them, and no public list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

Hooks = dict[int, Callable[..., Any]]

_FORWARD = {"forward pre-hook": "_forward_pre_hooks", "forward hook": "_forward_hooks"}
_BACKWARD = {"backward pre-hook": "_backward_pre_hooks", "backward hook": "_backward_hooks"}
_OF_TENSORS = {"gradient hook": "_backward_hooks", "post-accumulate-grad hook": "_post_accumulate_grad_hooks"}

flags_of_parameter: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter("requires_grad", *_OF_TENSORS.values())


def forward_hooks(module: torch.nn.Module) -> Iterator[tuple[str, str, Hooks]]:
    yield from _of_modules(module, _FORWARD)


def gradient_hooks(module: torch.nn.Module) -> Iterator[tuple[str, str, Hooks]]:
    yield from _of_modules(module, _BACKWARD)
    for path, parameter in module.named_parameters():
        yield from ((path, kind, getattr(parameter, name) or {}) for kind, name in _OF_TENSORS.items())


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or of_optimizers._global_optimizer_pre_hooks or of_optimizers._global_optimizer_post_hooks)


def _of_modules(module: torch.nn.Module, kinds: Mapping[str, str]) -> Iterator[tuple[str, str, Hooks]]:
    for path, each in module.named_modules():
        yield from ((path, kind, getattr(each, name)) for kind, name in kinds.items())
    yield from (("every module", kind, getattr(of_modules, f"_global{name}")) for kind, name in kinds.items())
