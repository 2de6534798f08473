"""Habits of a torch loop after `prepare`: changes of the module, the optimizer and the scheduler between two steps.

The parameters live in the step's state, and the update is compiled, so a change that a step cannot follow is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..errors import SideEffectError
from ..functions import Snapshot, require_no_gradient_hooks
from .torch_optimizers import options_of, require_fresh


class Habits:
    def __init__(self, module: nn.Module, trained: Collection[str], optimizer: Any, scheduler: Any) -> None:
        self._module, self._name = module, type(module).__name__
        self._parameters = dict(module.named_parameters())
        self._trained = {name: self._parameters[name] for name in trained}
        self._structure, self._flags = self._names(), self._flags_now()
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._has_scheduler = scheduler is not None
        self._options = self._options_now()
        self._schedulers = Snapshot(_attributes_of(scheduler, "scheduler"))

    def require_same(self) -> bool:
        """Refuse changes that a compiled step cannot follow. Return whether the module has the same tensors."""
        is_same = self._structure.holds()
        if not is_same:
            self._require_same_parameters()
            self._structure = self._names()
        if self._flags_now() != self._flags:
            self._require_same_flags()
        if not self._schedulers.holds():
            raise SideEffectError(f"prepare: {self._schedulers}. {_OF_RATES}")
        if self._optimizer is not None:
            require_fresh(self._optimizer)
            if self._options_now() != self._options:
                self._require_same_options()
        return is_same

    def _names(self) -> Snapshot:
        kinds = ("_parameters", "_buffers", "_modules")
        named = self._module.named_modules()
        return Snapshot([(path, vars(each)[kind]) for path, each in named for kind in kinds if vars(each)[kind]])

    def _flags_now(self) -> list[tuple[Any, ...]]:
        return [*map(_torch.flags_of_parameter, self._parameters.values())]

    def _options_now(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else options_of(self._optimizer, with_rates=self._has_scheduler)

    def _require_same_parameters(self) -> None:
        now = dict(self._module.named_parameters())
        for name, parameter in self._trained.items():
            if now.get(name) is not parameter:
                raise SideEffectError(
                    f"prepare: the parameter {name} of {self._name} was {'replaced' if name in now else 'removed'}. "
                    f"Write values into the parameter after step.module(). For other parameters, {_CONTINUE}"
                )

    def _require_same_flags(self) -> None:
        require_no_gradient_hooks(self._module, self._name)
        now = self._flags_now()
        for name, old, new in zip(self._parameters, self._flags, now, strict=True):
            if old[0] != new[0]:
                raise SideEffectError(
                    f"prepare: requires_grad of the parameter {name} of {self._name} was {old[0]} and is {new[0]}. "
                    f"Call step.module(), and {_CONTINUE}"
                )
        self._flags = now  # a hook was added and removed

    def _require_same_options(self) -> None:
        now = self._options_now()
        groups = zip(self._options, now, strict=False)
        changes = (
            f"optimizer.param_groups[{number}][{key!r}] was {old[key]!r} and is {new[key]!r}"
            if key != "params"
            else f"optimizer.param_groups[{number}]['params'] has other parameters"
            for number, (old, new) in enumerate(groups)
            for key in old
            if old[key] != new[key]
        )
        change = next(changes, f"optimizer.param_groups had {len(self._options)} groups and has {len(now)}")
        if "['lr']" in change:
            raise SideEffectError(f"prepare: {change}. {_OF_RATES}")
        raise SideEffectError(
            f"prepare: {change}. A step is compiled for the groups and options at fp.prepare; only lr may change, if "
            f"fp.prepare was given no scheduler. Set it before, or {_CONTINUE}"
        )


_CONTINUE = (
    "prepare a new step, with an optimizer that has made no steps. It can take over the state, if it trains the same "
    "parameters: new.state = new.train.load(*step.train.whole(step.state), step.state.step)"
)
_OF_RATES = (
    "A step has a copy of the scheduler that fp.prepare was given, and steps the copy after each update. Leave out "
    "scheduler.step() and other changes of the rate; or give fp.prepare no scheduler, and set the rate in the loop"
)


def _attributes_of(scheduler: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if scheduler is not None:
        yield name, vars(scheduler)
        for number, each in enumerate(getattr(scheduler, "_schedulers", ())):
            yield from _attributes_of(each, f"{name}._schedulers[{number}]")
