"""Optimizers of `torch.optim`, with parameter groups, as optimizers of this library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from .. import _torch, optim
from ..optim import Optimizer, PathSet, Schedule

__all__ = ["translated"]

_CLASSES: dict[type[torch.optim.Optimizer], tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    torch.optim.AdamW: (optim.adamw, ("betas", "eps", "weight_decay")),
    torch.optim.Adam: (optim.adam, ("betas", "eps", "weight_decay")),
    torch.optim.SGD: (optim.sgd, ("momentum", "dampening", "nesterov", "weight_decay")),
    torch.optim.Adafactor: (optim.adafactor, ("beta2_decay", "eps", "d", "weight_decay")),
}
_OF_IMPLEMENTATIONS = {"lr", "foreach", "fused", "capturable"}


def translated(optimizer: torch.optim.Optimizer, module: nn.Module, rates: list[Schedule]) -> Optimizer:
    """Return the optimizer of this library that makes the same updates, for the parameters of a module by name.

    There is a rate for each parameter group. Parameters in no group are frozen.
    """
    kind = type(optimizer)
    if kind not in _CLASSES:
        known = ", ".join(each.__name__ for each in _CLASSES)
        raise TypeError(
            f"prepare cannot translate {kind.__module__}.{kind.__qualname__}: it knows {known} of torch.optim, and no "
            "subclass of them, which may update differently. Give an optimizer of fp.optim, or a pair of functions "
            "fp.optim.Optimizer(init, update)"
        )
    _require_fresh(optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    groups: dict[str, Optimizer | None] = {}
    for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
        members = [names.pop(id(parameter), None) for parameter in group["params"] if parameter.requires_grad]
        if None in members:
            shape = tuple(group["params"][members.index(None)].shape)
            raise ValueError(
                f"prepare: group {number} of the optimizer has a parameter of shape {shape} that is not one of "
                f"{type(module).__name__}, or is in a group before it; make the optimizer of module.parameters()"
            )
        if members:
            found = [name for name in members if name is not None]
            groups[PathSet(f"group {number}", found)] = _of_group(kind, number, group, rate)
    if not groups:
        raise ValueError("prepare: no group of the optimizer has a parameter that requires a gradient")
    if names:
        groups[PathSet("in no group", names.values())] = None
    return optim.by_path(groups)


def _of_group(kind: type[torch.optim.Optimizer], number: int, group: Mapping[str, Any], rate: Schedule) -> Optimizer:
    make, options = _CLASSES[kind]
    neutral = cast(Any, kind)([torch.zeros(1)], lr=0.0).defaults  # keys that it lacks are notes of schedulers
    others = {key: group[key] for key in neutral.keys() - {*options, *_OF_IMPLEMENTATIONS}}
    wrong = [f"{key}={value!r}" for key, value in others.items() if value != neutral[key]]
    if wrong:
        raise ValueError(
            f"prepare: group {number} of {kind.__name__} has {', '.join(wrong)}, which fp.optim.{make.__name__} does "
            f"not do; it takes {', '.join(options)}"
        )
    return make(rate, **{key: group[key] for key in options})


def _require_fresh(optimizer: torch.optim.Optimizer) -> None:
    if any(optimizer.state.values()):
        raise ValueError(
            "prepare: the optimizer has made steps, and its state would be lost: prepare it before the first step, and "
            "continue a run by step.train.load"
        )
    if _torch.has_step_hooks(optimizer):
        raise ValueError(
            "prepare: the optimizer has step hooks, Python functions that a compiled step cannot call. Remove them, or "
            "call them in the loop"
        )
