"""Schedulers of `torch.optim.lr_scheduler` as functions from the number of updates to the learning rate.

The scheduler itself computes the rates, on a copy of its optimizer that has the groups and no parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["rates_of"]


def rates_of(scheduler: Any, optimizer: torch.optim.Optimizer, every: int) -> list[float | Callable[[Any], float]]:
    """Return the rate of each parameter group, a function of the number of updates done if a scheduler changes it.

    The scheduler steps once per `every` updates.
    """
    if scheduler is None:
        return [float(group["lr"]) for group in optimizer.param_groups]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "prepare: ReduceLROnPlateau reads the loss, so its rate is no function of the number of updates. Give "
            "fp.optim a rate from schedules, or stop and load the state with another optimizer when the loss stalls"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"prepare takes a scheduler of torch.optim.lr_scheduler, not {type(scheduler).__name__}; an optimizer of "
            "fp.optim takes its schedule as its rate"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError("prepare: the scheduler belongs to another optimizer than the one that is given")
    if not (isinstance(every, int) and every > 0):
        raise ValueError(f"prepare(scheduler_every={every!r}): give a number of updates, at least 1")
    course = _Course(scheduler, optimizer, every)
    course.rates(1)  # a scheduler that cannot be translated is refused here, not in training
    return [_Rate(course, number) for number in range(len(optimizer.param_groups))]


class _Rate:
    """The rate of one group."""

    def __init__(self, course: _Course, group: int) -> None:
        self.course, self.group = course, group

    def __call__(self, updates: Any) -> float:
        return self.course.rates(int(updates))[self.group]

    def __repr__(self) -> str:
        return f"{type(self.course.scheduler).__name__}, group {self.group}"


class _Course:
    """The rates of all groups, computed as far as asked for."""

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer, every: int) -> None:
        groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
        self.optimizer: torch.optim.Optimizer = cast(Any, type(optimizer))(groups)
        for own, group in zip(self.optimizer.param_groups, optimizer.param_groups, strict=True):
            own.update({key: copy.copy(value) for key, value in group.items() if key != "params"})
        self.scheduler = copy.deepcopy(scheduler, {id(optimizer): self.optimizer})
        self.every, self._found = every, [self._now()]
        self._others = self._options()

    def rates(self, updates: int) -> list[float]:
        step = updates // self.every
        while len(self._found) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no optimizer step preceded it
                self.scheduler.step()
            if self._options() != self._others:
                raise ValueError(
                    f"prepare: {type(self.scheduler).__name__} changes more than the learning rate (momentum or betas, "
                    "as with cycle_momentum=True); here these are constant. Give it cycle_momentum=False"
                )
            self._found.append(self._now())
        return self._found[step]

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _options(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups]
