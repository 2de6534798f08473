"""Training step with a replica of the parameters on each rank of an axis: local SGD and DiLoCo.

The step of one replica is the training step of the plan without the axis. Here it is put on the replicas' rows of
stacked parameters and optimizer states, and followed, in every n-th step, by an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P

from .. import random
from ..collectives import axis_index, axis_size, pmean, psum, pvary
from ..functions import Layout, LocalFunction, PyTree, SpecTree
from ..ir import is_trained, scalar_beside
from ..optim import like_params
from ..pipelines import pipeline_of
from ..requests import Replicas, ReplicaState, flat_update, owners_of, state_requests
from .local_step import Metrics
from .update import StepLayout


def replicas_of(layout: Layout, has_aux: bool) -> Replicas | None:
    """Return the request for replicas of a layout, if any. Raise if another part of the plan does not go with it."""
    request = layout.last(Replicas)
    if request is None:
        return None
    added = [str(each) for each in state_requests(layout)]
    added += ["fp.zero(layout='flat')"] * flat_update(layout) + ["fp.pipeline"] * (pipeline_of(layout) is not None)
    added += ["has_aux=True"] * has_aux
    if added:
        raise ValueError(
            f"{request} do not go with {added[0]}: each replica has parameters, optimizer state and a loss of its "
            "own; leave it out, or use fp.data_parallel"
        )
    return request


def first_replicas(request: Replicas, mesh: Mesh, params: PyTree, state: PyTree) -> ReplicaState:
    """Return the first state of the replicas, from full parameters and a full optimizer state."""
    count = mesh.axis_size(request.axis)

    def stacked(leaf: Any) -> Any:
        return leaf.unsqueeze(0).expand(count, *leaf.shape) if isinstance(leaf, torch.Tensor) else leaf

    outer = None if request.outer is None else request.outer.init(params)
    loss, steps = stacked(scalar_beside(params, dtype=torch.float64)), scalar_beside(params, 0, torch.int64)
    rows, optimizer = optree.tree_map(stacked, (params, state))
    return ReplicaState(rows, optimizer, outer, loss, steps)


def one_replica(state: PyTree) -> PyTree:
    """Return the optimizer state of the first replica, full; another state unchanged."""
    return optree.tree_map(_row, state.optimizer) if isinstance(state, ReplicaState) else state


def replica_specs(
    request: Replicas, places: StepLayout, params: PyTree, state: ReplicaState, specs: SpecTree
) -> ReplicaState:
    """Return the specs of a full state of replicas; `specs` are those of the optimizer state of one replica."""

    def rows(spec: P) -> P:
        padded = {dim + 1: size for dim, size in spec.padded.items()}
        return spec.replace([request.axis, *spec.dims], padded=padded)

    kept, optimizer = optree.tree_map(rows, (places.kept, specs))
    loss = P(request.axis, owner=places.owners)
    return ReplicaState(kept, optimizer, like_params(state.outer, params, places.kept), loss, P())


@dataclass(frozen=True)
class _Exchange:
    """New parameters, of the last exchange and of this rank's replica, and the state of the outer optimizer."""

    params: PyTree
    replica: PyTree
    outer: PyTree


def on_replicas(
    request: Replicas,
    layout: Layout,
    replica: Callable[[SpecTree], LocalFunction],
    specs: tuple[SpecTree, ReplicaState],
    exchanges: bool,
) -> LocalFunction:
    """Return the step of all replicas, as a function of the arguments that `LocalTrainStep.on` has.

    `replica` returns the step of one replica from the specs of its optimizer state. `layout` is over all axes.
    """
    axis, step = request.axis, replica(optree.tree_map(_spec_of_row, specs[1].optimizer))

    def call(held: tuple[PyTree, ReplicaState], batch: tuple[PyTree, ...], key: Any) -> Any:
        params, replicas = held
        own = optree.tree_map(_row, (replicas.params, replicas.optimizer))
        (new, optimizer), metrics = step.run(own, batch, None if key is None else random.fold_in(key, axis_index(axis)))
        loss, steps = replicas.loss + metrics.loss.double(), replicas.steps + 1
        if exchanges:
            done, mean = _exchanged(request, params, new, replicas.outer), psum(loss.sum(), axis) / axis_size(axis)
            shown = Metrics((mean / steps).to(metrics.loss.dtype), None)
            loss, steps = torch.zeros_like(loss), torch.zeros_like(steps)
        else:
            done, shown = _Exchange(params, new, replicas.outer), Metrics(None, None)  # type: ignore[arg-type]  # without exchange
        replica, optimizer = optree.tree_map(_as_row, (done.replica, optimizer))
        after = (done.params, ReplicaState(replica, optimizer, done.outer, loss, steps)), shown
        return after, (specs, optree.tree_map(lambda _: P(owner=owners_of(layout)), shown))

    def arguments(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        (params, _), batch, _ = args
        return (specs, tuple(layout.arguments((params, *batch))[1:]), P())

    return LocalFunction(call, replace(layout, arguments=arguments), "train_step")


def _exchanged(request: Replicas, params: PyTree, new: PyTree, outer: PyTree) -> _Exchange:
    def mean(old: Any, leaf: Any) -> Any:
        return pmean(leaf, request.axis) if is_trained(leaf) else old

    after = optree.tree_map(mean, params, new)
    if request.outer is not None:
        gradients = optree.tree_map(lambda old, leaf: old - leaf if is_trained(leaf) else None, params, after)
        after, outer = request.outer.update(gradients, outer, params)
    replica = optree.tree_map(lambda x: pvary(x, request.axis) if isinstance(x, torch.Tensor) else x, after)
    return _Exchange(after, replica, outer)


def _row(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, torch.Tensor) else leaf


def _as_row(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, torch.Tensor) else leaf


def _spec_of_row(spec: P) -> P:
    return spec.replace(spec.dims[1:], padded={dim - 1: size for dim, size in spec.padded.items()})
