"""Stop a run if its loss or gradient is not finite.

A NaN on all ranks would train on without an error. So every step checks its loss and gradient norm, which every rank
holds already. Values in main memory are checked immediately. On a device the host would have to wait for them. There a
flag is copied while the device works, and the next step checks it after its own work is queued.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import optree
import torch

from sharding_specs import tree_paths

from .. import _torch
from ..errors import NonFiniteError
from ..functions import LocalFunction, PyTree
from ..requests import ScaleLoss
from ..runtime import PipelineValue, Runtime
from .local_step import Metrics
from .step_options import StepOptions
from .train_state import TrainState, Watched

T = TypeVar("T")


class CheckedStates(Protocol):
    """The states of a training step; see `States`."""

    f: LocalFunction
    options: StepOptions

    def check(self, state: TrainState) -> None: ...

    def runtime_for(self, state: TrainState) -> Runtime[Any, Any]: ...


def settle(states: CheckedStates, state: TrainState) -> None:
    """Check the flag of a state's last step on a device, if it has not been checked."""
    watched, state.watched = state.watched, None
    if watched is not None:
        watched.copied.synchronize()
        if not bool(watched.flag):
            _refuse(states, watched.step, state, watched.metrics)


def require_finite(states: CheckedStates, before: TrainState, state: TrainState, metrics: Metrics) -> None:
    """Check that a step's loss and gradient norm are finite. On a device, check the previous step instead."""
    if metrics.loss is None or _torch.has_functorch_level([metrics.loss]):
        return
    scaled = states.f.applied.last(ScaleLoss)
    minimum = 0.0 if scaled is None else scaled.rules.minimum
    good = _is_good(metrics, minimum)
    if _is_in_main_memory(metrics):
        if not bool(good):
            _refuse(states, before.step, state, metrics)
        return
    state.watched = before.watched
    settle(states, state)
    state.watched = _copied(before.step, metrics, good)


def _is_in_main_memory(metrics: Metrics) -> bool:
    return metrics.loss.device.type == "cpu"


def _is_good(metrics: Metrics, minimum: float) -> torch.Tensor:
    """Return whether loss and norm are finite, or the step was skipped above the lowest loss scale."""
    good = torch.isfinite(metrics.loss.detach())
    if metrics.grad_norm is not None:
        good = good & torch.isfinite(metrics.grad_norm.detach())
    if metrics.skipped is not None and metrics.loss_scale is not None:
        good = torch.where(metrics.skipped, metrics.loss_scale > minimum, good)
    return good


def _copied(step: int, metrics: Metrics, good: torch.Tensor) -> Watched:
    flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    flag.copy_(good, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Watched(step, metrics, flag, copied)


def _refuse(states: CheckedStates, step: int, state: TrainState, metrics: Metrics) -> None:
    if metrics.skipped is not None and bool(metrics.skipped):
        return states.check(state)  # the loss scale decides whether this overflow is an error
    wrong, count = not_finite(states, state)
    values = f"loss {metrics.loss.item():.6g}"
    values += "" if metrics.grad_norm is None else f", gradient norm {metrics.grad_norm.item():.6g}"
    told = (
        f"the first parameter that is not finite after it is {wrong[0]} ({len(wrong)} of {count} are not)"
        if wrong
        else f"all {count} parameters are finite after it"
    )
    begin = (
        f"make the state before step {step} again, from what was saved"
        if states.options.donate
        else f"take the state that was given to step {step}"
    )
    raise NonFiniteError(
        f"step {step} is not finite: {values}; {told}. To find the op that made it, {begin}, and call "
        f"train.replay(state, *batch) with the batch of step {step}: it runs the step op by op. To train on, use "
        'train_step(nonfinite="continue")',
        step,
        wrong[0] if wrong else None,
        state,
        metrics,
    )


def require_finite_inputs(states: CheckedStates, state: TrainState, batch: tuple[PyTree, ...]) -> None:
    """Check that the parameters are finite and the batch has no NaN before a replay searches for an op."""
    wrong, count = not_finite(states, state)
    if wrong:
        raise ValueError(
            f"train.replay: {wrong[0]} is not finite before step {state.step} ({len(wrong)} of {count} parameters are "
            "not), so no op of this step made it: replay an earlier step, with a state from before that"
        )
    leaves = zip(tree_paths(batch), optree.tree_leaves(batch), strict=True)
    mine = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor) and bool(torch.isnan(leaf).any())]
    found = states.runtime_for(state).exchange(mine, "to compare batches")
    for rank, paths in enumerate(found):
        if paths:
            raise ValueError(f"train.replay: {paths[0] or 'the batch'} of the batch has a NaN on rank {rank}")


def not_finite(states: CheckedStates, state: TrainState) -> tuple[list[str], int]:
    """Return the paths of the parameters that are not finite on some rank, and the number of parameters."""
    count = state.layout.params.num_leaves
    mine = [index for index, handle in enumerate(state.handles[:count]) if not _all_finite(handle)]
    every = states.runtime_for(state).exchange(mine, "to name the parameters that are not finite")
    paths = tree_paths(state.layout.params.unflatten(range(count)))
    return [paths[index] or "the parameter" for index in sorted(set().union(*every))], count


def _all_finite(handle: T) -> bool:
    if isinstance(handle, PipelineValue):
        return all(map(_all_finite, handle.parts.values()))
    if isinstance(handle, list):
        return all(map(_all_finite, handle))
    if not isinstance(handle, torch.Tensor) or handle.is_meta:  # what another rank holds
        return True
    return not (handle.is_floating_point() or handle.is_complex()) or bool(torch.isfinite(handle).all())
