"""A compiled training step for scripts with a torch module, a torch optimizer and a loop."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import nn

from sharding_specs import Mesh

from ..errors import SideEffectError
from ..functions import BatchSplit, applied_to, functional, require_no_gradient_hooks
from ..optim import Optimizer, Schedule
from ..optim import ema as averaged
from ..requests import Buffers, DataAxis, owners_of, split_state, with_leaves
from ..runtime import world_size
from ..training import Metrics, TrainStep, train_step
from ..transforms import data_parallel
from .habits import Habits
from .module_writes import Writes
from .torch_optimizers import rates_of, translated

Model = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
Plan = Callable[[Callable[..., Any]], Callable[..., Any]]


def prepare(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Optimizer,
    scheduler: Any = None,
    *,
    loss: Callable[..., torch.Tensor],
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    scheduler_every: int = 1,
    ema: Schedule | None = None,
    statistics: str = "rank",
    **options: Any,
) -> PreparedStep:
    """Turn the parts of a training loop into one step that replaces forward, backward, clipping and updates.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> module = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    >>> def loss(model, x, y):
    ...     return (model(x) - y).square().mean()
    >>> step = fp.prepare(module, optimizer, scheduler, loss=loss, mesh=Mesh(data=2), plan=fp.zero(2, "data"))
    >>> x = torch.randn(8, 2)
    >>> losses = [step(x, x.sum(1, keepdim=True)).item() for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    >>> predict = step.eval(lambda model, x: model(x))
    >>> torch.allclose(predict(x), step.module()(x), atol=1e-6)
    True

    Args:
        module: the module. It is not changed until `step.module()`. Values written into its parameters after
            `step.module()` are taken into the state; docs/migration.md has a table of such changes.
        optimizer: an optimizer of `torch.optim` that has made no step, with any parameter groups, or one of `fp.optim`
            for the parameters by name. Parameters in no group stay fixed, as in torch. Without a scheduler, a step
            uses the rates that its groups have at that time.
        scheduler: a scheduler of `torch.optim.lr_scheduler` for this optimizer. It is copied.
        loss: `loss(model, *batch) -> scalar`, the mean over the batch; `model` is called like the module.
        mesh: the mesh; by default `Mesh(data=n)` for n processes.
        plan: the plan, as for `train_step`; without a mesh, `fp.data_parallel("data")` by default. `fp.accumulate(n)`
            in it accumulates gradients.
        scheduler_every: number of updates per step of the scheduler: the length of an epoch, if the script steps it
            once per epoch.
        ema: decay of an average of the parameters, as for `fp.optim.ema`, for `step.module(ema=True)`.
        statistics: the samples by which a batch norm in training normalises. "rank" is as in torch: those of the rank's
            microbatch, and for `nn.SyncBatchNorm` those of the microbatch of all ranks. "all" is the second for every
            batch norm. Running statistics are those of rank 0, or of all.
        options: options of `train_step`, such as `clip`, `seed` and `batch`.

    Returns:
        The step: `value = step(*batch)`. The buffers in the module's `state_dict` are a part of its state. Batch norms
        update theirs once per microbatch, and other modules once per step. Buffers that are not persistent are
        constants.

    Raises:
        TypeError: for a module, optimizer or scheduler that is none, or that has no counterpart here.
        ValueError: for an option of the optimizer without counterpart, an optimizer that has made steps, a scheduler
            that reads the loss, and unknown `statistics`. When called, for a batch norm of a batch that does not divide
            by ranks and microbatches, and a forward that writes a buffer that is not persistent.
        SideEffectError: for hooks on gradients or on steps. A step raises it if the module or the optimizer was changed
            in a way that it cannot follow.
    """
    if mesh is None:
        mesh, plan = Mesh(data=world_size()), plan or data_parallel("data")
    require_no_gradient_hooks(module, f"prepare: {type(module).__name__}")
    fn, params, every = functional(module, buffers=True, groups=_split(mesh, plan, statistics))
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in every.items() if name in saved}
    if isinstance(optimizer, Optimizer):
        if scheduler is not None:
            raise TypeError("prepare: an optimizer of fp.optim takes its schedule as its rate; leave out the scheduler")
        own = optimizer
    else:
        own = translated(optimizer, module, rates_of(scheduler, optimizer, scheduler_every))
    own = own if ema is None else averaged(own, ema)
    of_params = _of_params(loss, fn, "loss", bool(buffers), options.get("has_aux", False))
    train = train_step(of_params, own, mesh, plan, buffers=buffers or None, **options)
    return PreparedStep(module, fn, train, params, plan, Habits(module, params, optimizer, scheduler))


def _split(mesh: Mesh, plan: Plan | None, statistics: str) -> BatchSplit:
    if statistics not in ("rank", "all"):
        raise ValueError(f"prepare(statistics={statistics!r}): it is 'rank', as in torch, or 'all'")
    applied = applied_to(_nothing if plan is None else plan(_nothing))
    applied.mesh(mesh)  # raises if an axis of the plan is missing
    axes = {*(each.axis for each in applied.all(DataAxis)), *owners_of(applied)}
    ranks = prod(mesh.axis_size(axis) for axis in axes)
    return BatchSplit(ranks, prod(applied.virtual_sizes(mesh).values()), statistics == "all")


def _nothing(params: Any) -> None:
    """Function that a plan is applied to for its requests."""


class PreparedStep:
    """Training step with its state; see `prepare`.

    Attributes:
        train: the training step, a pure function of states.
        state: the current state, of `train`.
        metrics: metrics of the last step; None before the first.
    """

    def __init__(
        self, module: nn.Module, fn: Model, train: TrainStep, params: Any, plan: Plan | None, habits: Habits
    ) -> None:
        self.train, self.state = train, train.init(params)
        self.metrics: Metrics | None = None
        self._module, self._fn, self._plan, self._habits = module, fn, plan, habits
        held = (
            name
            for each in train.states.arguments(*train.states.shapes(self.state.layout, self.state))
            for name in each
        )
        named = dict(_tensors(module))
        self._writes, self._in_module = Writes({name: named[name] for name in held}), self.state
        self._has_refused = False  # values that were written into the module, which `module` then overwrites

    def __call__(self, *batch: Any, **named: Any) -> torch.Tensor:
        """Train on one batch. Return the loss before the update, detached."""
        self._follow()
        self.state, self.metrics = self.train(self.state, *batch, **named)
        return self.metrics.loss

    def module(self, *, ema: bool = False) -> nn.Module:
        """Write the current parameters and buffers into the module, on every process, and return it.

        Args:
            ema: whether to return a copy of the module with the average of the parameters instead.
        """
        self._follow(overwrites=not ema)
        buffers = self.train.buffers(self.state) if self.train.programs.passed else {}
        current = {**buffers, **self.train.params(self.state, ema=ema)}
        if ema:
            return _filled(deepcopy(self._module), current)
        self._writes.release()
        _filled(self._module, current)
        self._writes.arm()
        self._in_module, self._has_refused = self.state, False
        return self._module

    def _follow(self, *, overwrites: bool = False) -> None:
        if not self._habits.require_same():
            self._writes.follow(dict(_tensors(self._module)))
        written = self._writes.found()
        if not written or (overwrites and self._has_refused):
            return
        params, state = self.train.whole(self.state)
        held = dict(ChainMap(*self.train.states.arguments(params, state)))
        is_current = self.state is self._in_module
        late = [name for name in written if not (is_current or self._writes.had(name, held[name]))]
        if late:
            self._has_refused = True
            raise SideEffectError(
                f"prepare: values were written into {', '.join(late)} of {type(self._module).__name__}, which had the "
                f"values of an earlier step, not of step {self.state.step}: call step.module() before you write. To "
                "continue from a saved state, use step.state = step.train.load(…) or step.train.restore(…)"
            )
        for name, value in written.items():
            for kind in ("dtype", "shape", "device"):
                if getattr(value, kind) != getattr(held[name], kind):
                    raise SideEffectError(
                        f"prepare: {name} of {type(self._module).__name__} has the {kind} {getattr(value, kind)}, and "
                        f"the step has {getattr(held[name], kind)}: change it before fp.prepare"
                    )
        optimizer_state, leaves = split_state(state, self.train.programs.requests)
        leaves = [
            {name: written.get(name, old) for name, old in tree.items()} if isinstance(each, Buffers) else tree
            for each, tree in zip(self.train.programs.requests, leaves, strict=True)
        ]
        params = {name: written.get(name, old) for name, old in params.items()}
        self.state = self.train.load(
            params, with_leaves(optimizer_state, self.train.programs.requests, leaves), self.state.step
        )
        self._in_module = self.state if is_current else self._in_module
        self._writes.arm()

    def eval(self, f: Callable[..., Any], *, batch: str | None = None, ema: bool = False) -> Callable[..., Any]:
        """Compile a function of the model that is evaluated on the sharded state. It is called with batches.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> optimizer = fp.optim.sgd(0.1)
        >>> step = fp.prepare(torch.nn.Linear(2, 1), optimizer, loss=lambda model, x: model(x).mean(), mesh=Mesh())
        >>> mean = step.eval(lambda model, x: model(x).mean())
        >>> bool(mean(torch.ones(4, 2)) == step(torch.ones(4, 2)))
        True

        Args:
            f: `f(model, *batch)`. The module is in the mode `eval` during the call. Under a plan, the batch is sharded
                as in training.
            batch: "global" or "own", as for `train.compile`; by default like the step.
            ema: whether the model has the average of the parameters.

        Returns:
            `evaluate(*batch)`, of the current parameters, with full tensors as results.
        """
        of_params = _of_params(f, self._fn, "f", bool(self.train.programs.passed))
        compiled = self.train.compile(of_params if self._plan is None else self._plan(of_params), batch=batch, ema=ema)

        def evaluate(*batch: Any, **named: Any) -> Any:
            self._follow()
            modes = [(each, each.training) for each in self._module.modules()]
            self._module.eval()
            try:
                return compiled(self.state, *batch, **named)
            finally:
                for each, mode in modes:
                    each.training = mode

        return evaluate

    def __repr__(self) -> str:
        return f"prepare({type(self._module).__name__}, {self.train!r})"


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _filled(module: nn.Module, current: Tensors) -> nn.Module:
    with torch.no_grad():
        for name, tensor in _tensors(module):
            if name in current:
                tensor.copy_(current[name])
    return module


class _Model:
    def __init__(self, fn: Model, params: Tensors, buffers: Tensors) -> None:
        self.fn, self.params, self.buffers = fn, params, buffers

    def __call__(self, *args: Any, **named: Any) -> Any:
        result, self.buffers = self.fn(self.params, self.buffers, *args, **named)
        return result


def _of_params(
    f: Callable[..., Any], fn: Model, name: str, buffered: bool, has_aux: bool | None = None
) -> Callable[..., Any]:
    def of_params(params: Tensors, /, *batch: Any, **named: Any) -> Any:
        buffers, batch = (batch[0], batch[1:]) if buffered else ({}, batch)
        model = _Model(fn, params, buffers)
        result = f(model, *batch, **named)
        if not buffered or has_aux is None:
            return result
        return (result[0], (model.buffers, result[1])) if has_aux else (result, model.buffers)

    of_params.__name__ = getattr(f, "__name__", name)
    return of_params
