"""Optimizers of `torch.optim`, with parameter groups and a scheduler, as optimizers of this library.

A scheduler becomes functions from the number of updates to the learning rate. The scheduler itself computes the rates,
on a copy of its optimizer that has the groups and no parameters.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .. import _torch, optim
from ..errors import SideEffectError
from ..optim import Optimizer, PathSet, Schedule
from ..tracing import assume

_CLASSES: dict[type[torch.optim.Optimizer], tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    torch.optim.AdamW: (optim.adamw, ("betas", "eps", "weight_decay")),
    torch.optim.Adam: (optim.adam, ("betas", "eps", "weight_decay")),
    torch.optim.SGD: (optim.sgd, ("momentum", "dampening", "nesterov", "weight_decay")),
    torch.optim.Adafactor: (optim.adafactor, ("beta2_decay", "eps", "d", "weight_decay")),
}
_OF_IMPLEMENTATIONS = {"lr", "foreach", "fused", "capturable"}


def translated(optimizer: torch.optim.Optimizer, module: nn.Module, rates: list[Schedule]) -> Optimizer:
    """Return the optimizer with the same updates. Parameters in no group are frozen."""
    kind = type(optimizer)
    if kind not in _CLASSES:
        known = ", ".join(each.__name__ for each in _CLASSES)
        raise TypeError(
            f"prepare cannot translate {kind.__module__}.{kind.__qualname__}: it knows {known} of torch.optim, and no "
            "subclass. Give an optimizer of fp.optim, or a pair fp.optim.Optimizer(init, update)"
        )
    require_fresh(optimizer)
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
    neutral = cast(Any, kind)(
        [torch.zeros(1, device="cpu")], lr=0.0
    ).defaults  # keys that it lacks are notes of schedulers
    others = {key: group[key] for key in neutral.keys() - {*options, *_OF_IMPLEMENTATIONS}}
    wrong = [f"{key}={value!r}" for key, value in others.items() if value != neutral[key]]
    if wrong:
        raise ValueError(
            f"prepare: group {number} of {kind.__name__} has {', '.join(wrong)}, which fp.optim.{make.__name__} does "
            f"not do; it takes {', '.join(options)}"
        )
    chosen = {key: group[key] for key in options}
    if (cycled := getattr(rate, "momentum", None)) is not None:
        chosen |= {"betas": (cycled, group["betas"][1])} if "betas" in chosen else {"momentum": cycled}
    return make(rate, **chosen)


def require_fresh(optimizer: torch.optim.Optimizer) -> None:
    if any(optimizer.state.values()):
        raise SideEffectError(
            "prepare: the optimizer has made steps, or has loaded a state, that a step does not use: prepare it before "
            "the first step, leave out optimizer.step(), and continue a run by step.train.load"
        )
    if _torch.has_step_hooks(optimizer):
        raise SideEffectError("prepare: the optimizer has step hooks, which a step cannot call. Call them in the loop")


def options_of(optimizer: torch.optim.Optimizer, *, with_rates: bool) -> list[dict[str, Any]]:
    keys = [key for key in optimizer.defaults if key not in _OF_IMPLEMENTATIONS or (with_rates and key == "lr")]
    return [
        {
            **{key: tuple(group[key]) if isinstance(group[key], list) else group[key] for key in keys},
            "params": [*map(id, group["params"])],
        }
        for group in optimizer.param_groups
    ]


def rates_of(scheduler: Any, optimizer: torch.optim.Optimizer, every: int) -> list[Schedule]:
    if scheduler is None:
        return [_OwnRate(optimizer, number) for number in range(len(optimizer.param_groups))]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "prepare: ReduceLROnPlateau reads the loss, so its rate is no function of the number of updates. Give "
            "fp.optim a rate from schedules, or stop and load the state with another optimizer when the loss stalls"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"prepare takes a scheduler of torch.optim.lr_scheduler, not {type(scheduler).__name__}")
    if scheduler.optimizer is not optimizer:
        raise ValueError("prepare: the scheduler belongs to another optimizer than the one that is given")
    if not (isinstance(every, int) and every > 0):
        raise ValueError(f"prepare(scheduler_every={every!r}): give a number of updates, at least 1")
    course = _Course(scheduler, optimizer, every)
    course.at(1)  # a scheduler that cannot be translated is refused here, not in training
    return [_Rate(course, number) for number in range(len(optimizer.param_groups))]


class _OwnRate:
    """Rate of a group of a torch optimizer: a constant until a loop changes it, then read at each update."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        self.optimizer, self.group, self.is_constant = weakref.ref(optimizer), group, True  # programs outlive steps
        self.rate = float(optimizer.param_groups[group]["lr"])

    def __call__(self, updates: Any) -> float:
        if self._read():
            assume(self._read)
        else:
            int(updates)  # a trace does not have it, so the function is called when the program runs
        return self.rate

    def _read(self) -> bool:
        before, optimizer = self.rate, self.optimizer()
        if optimizer is not None:
            with _torch.disable_modes():  # a trace would depend on the content of a tensor
                self.rate = float(optimizer.param_groups[self.group]["lr"])
        self.is_constant = self.is_constant and self.rate == before
        return self.is_constant

    def __repr__(self) -> str:
        return f"{self.rate}"


class _Rate:
    def __init__(self, course: _Course, group: int) -> None:
        self.course, self.group = course, group
        self.momentum = self._momentum if course.cycles else None  # of SGD, or the first beta of Adam

    def __call__(self, updates: Any) -> float:
        return self.course.at(int(updates))[self.group][0]

    def _momentum(self, updates: Any) -> float:
        return self.course.at(int(updates))[self.group][1]

    def __repr__(self) -> str:
        return f"{type(self.course.scheduler).__name__}, group {self.group}"


class _Course:
    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer, every: int) -> None:
        groups = [{**group, "params": [torch.zeros(1, device="cpu")]} for group in optimizer.param_groups]
        self.optimizer: torch.optim.Optimizer = cast(Any, type(optimizer))(groups)
        for own, group in zip(self.optimizer.param_groups, optimizer.param_groups, strict=True):
            own.update({key: copy.copy(value) for key, value in group.items() if key != "params"})
        self.scheduler = copy.deepcopy(scheduler, {id(optimizer): self.optimizer})
        self.every, self.cycles, self._found = every, _cycles(scheduler), [self._now()]
        self._others = self._options()

    def at(self, updates: int) -> list[tuple[float, float]]:
        step = updates // self.every
        while len(self._found) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no optimizer step preceded it
                self.scheduler.step()
            if self._options() != self._others:
                raise ValueError(
                    f"prepare: {type(self.scheduler).__name__} changes more than the learning rate; here other options "
                    "are constant, and momentum or the first beta too unless the scheduler has cycle_momentum=True"
                )
            self._found.append(self._now())
        return self._found[step]

    def _now(self) -> list[tuple[float, float]]:
        return [(float(group["lr"]), _first_moment(group)) for group in self.optimizer.param_groups]

    def _options(self) -> list[dict[str, Any]]:
        options = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups]
        for group in options if self.cycles else ():
            group.update({"momentum": None, "betas": group.get("betas", ())[1:]})
        return options


def _cycles(scheduler: Any) -> bool:
    return getattr(scheduler, "cycle_momentum", False) or any(map(_cycles, getattr(scheduler, "_schedulers", ())))


def _first_moment(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum", group.get("betas", (0.0,))[0]))
