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

from sharding_specs import Mesh, P, broadcast_specs

from .. import random
from ..collectives import axis_index, axis_size, pmean, pmin, psum, pvary
from ..functions import Applied, LocalFunction, PyTree, Resolved, SpecTree, relayout_leaf
from ..ir import is_trained, scalar_beside
from ..optim import like_params
from ..pipelines import pipeline_of
from ..requests import (
    Masters,
    Replicas,
    ReplicaState,
    ScaleLoss,
    StateRequest,
    StoredType,
    flat_update,
    owners_of,
    split_state,
    state_requests,
    with_leaves,
)
from .local_step import Metrics
from .update import StepLayout, require_elementwise

Requests = tuple[StateRequest, ...]


def replicas_of(applied: Applied, has_aux: bool) -> Replicas | None:
    """Return the request for replicas of a layout, if any. Raise if another part of the plan does not go with it."""
    request = applied.last(Replicas)
    if request is None:
        return None
    known = (StoredType, ScaleLoss)
    added = [str(each) for each in state_requests(applied) if not isinstance(each, known)]
    added += ["fp.zero(layout='flat')"] * flat_update(applied) + ["fp.pipeline"] * (pipeline_of(applied) is not None)
    added += ["has_aux=True"] * has_aux
    if added:
        raise ValueError(
            f"{request} do not go with {added[0]}: each replica has parameters, optimizer state and a loss of its "
            "own; leave it out, or use fp.data_parallel"
        )
    return request


def masters_of(requests: Requests) -> Masters | None:
    """Return the request for masters, if any."""
    return next((each for each in requests if isinstance(each, Masters)), None)


def first_replicas(request: Replicas, mesh: Mesh, params: PyTree, state: PyTree, requests: Requests) -> ReplicaState:
    """Return the first state of the replicas, from full stored parameters and a full state of one replica."""
    count = mesh.axis_size(request.axis)

    def stacked(leaf: Any) -> Any:
        return leaf.unsqueeze(0).expand(count, *leaf.shape) if isinstance(leaf, torch.Tensor) else leaf

    kept = masters_of(requests)
    masters = None if kept is None else split_state(state, requests)[1][requests.index(kept)]
    trained = params if kept is None else kept.full(params, masters)
    outer = None if request.outer is None else request.outer.init(trained)
    if request.outer is not None:
        require_elementwise(request.outer, trained)
    loss, steps = stacked(scalar_beside(params, dtype=torch.float64)), scalar_beside(params, 0, torch.int64)
    rows, optimizer = optree.tree_map(stacked, (params, state))
    steps = stacked(steps) if any(each.may_skip for each in requests) else steps
    return ReplicaState(rows, optimizer, outer, loss, steps, masters)


def one_replica(state: PyTree) -> PyTree:
    """Return the optimizer state of the first replica, full; another state unchanged."""
    return optree.tree_map(_row, state.optimizer) if isinstance(state, ReplicaState) else state


def replica_specs(
    request: Replicas, layouts: StepLayout, params: PyTree, state: ReplicaState, specs: SpecTree
) -> ReplicaState:
    """Return the specs of a full state of replicas; `specs` belong to the optimizer state of one replica."""

    def rows(leaf: Any, spec: P) -> P:
        if not isinstance(leaf, torch.Tensor):
            return spec
        padded = {dim + 1: size for dim, size in spec.padded.items()}
        return spec.replace([request.axis, *spec.dims], padded=padded)

    held = state.params, state.optimizer
    kept, optimizer = optree.tree_map(rows, held, broadcast_specs((layouts.kept, specs), held))
    loss = P(request.axis, owner=layouts.owners)
    masters = like_params(state.masters, params, layouts.update)
    outer = like_params(state.outer, params, layouts.kept if state.masters is None else layouts.update)
    outer = outer if state.masters is None else layouts.with_numbers(state.outer, outer)
    return ReplicaState(kept, optimizer, outer, loss, loss if state.steps.ndim else P(), masters)


@dataclass(frozen=True)
class _Exchange:
    """Parameters of the last exchange and of this rank's replica, the replica's state, and the exchange's state."""

    params: PyTree
    replica: PyTree
    optimizer: PyTree
    outer: PyTree
    masters: PyTree


def on_replicas(
    request: Replicas,
    applied: Applied,
    layouts: StepLayout,
    replica: Callable[[SpecTree], LocalFunction],
    specs: tuple[SpecTree, ReplicaState],
    exchanges: bool,
) -> LocalFunction:
    """Return the step of all replicas, as a function of the arguments that `LocalTrainStep.on` has.

    `replica` returns the step of one replica from the specs of its optimizer state. `layout` is over all axes.
    """
    axis, step = request.axis, replica(optree.tree_map(_spec_of_row, specs[1].optimizer))
    requests = state_requests(applied)

    def call(resolved: Resolved, held: tuple[PyTree, ReplicaState], batch: tuple[PyTree, ...], key: Any) -> Any:
        params, replicas = held
        own = optree.tree_map(_row, (replicas.params, replicas.optimizer))
        own_key = None if key is None else random.fold_in(key, axis_index(axis))
        ((new, optimizer), metrics), _ = step.run(resolved.inside, own, batch, own_key)
        value, made = metrics.loss.double(), 1
        if metrics.skipped is not None:
            value, made = torch.where(metrics.skipped, 0, value), ~metrics.skipped
        loss, steps = replicas.loss + value, replicas.steps + made
        done = _Exchange(params, new, optimizer, replicas.outer, replicas.masters)
        if exchanges:
            done = _exchanged(request, layouts.entered(), requests, done)
            shown = _mean_loss(metrics, loss, steps, axis)
            loss, steps = torch.zeros_like(loss), torch.zeros_like(steps)
        else:
            shown = Metrics(None, None)  # type: ignore[arg-type]  # without exchange
        replica, optimizer = optree.tree_map(_as_row, (done.replica, done.optimizer))
        after = (done.params, ReplicaState(replica, optimizer, done.outer, loss, steps, done.masters)), shown
        return after, (specs, optree.tree_map(lambda _: P(owner=owners_of(applied)), shown))

    return LocalFunction(call, applied, "train_step")


def _mean_loss(metrics: Metrics, loss: torch.Tensor, steps: torch.Tensor, axis: str) -> Metrics:
    """Return the mean loss of the updates since the last exchange, and the lowest loss scale of the replicas."""
    total = psum(loss.sum(), axis)
    if metrics.skipped is None or metrics.loss_scale is None:
        return Metrics((total / axis_size(axis) / steps).to(metrics.loss.dtype), None)
    count = psum(steps.sum(), axis)
    mean, scale = total / count.clamp(min=1), pmin(metrics.loss_scale, axis)
    return Metrics(mean.to(metrics.loss.dtype), None, skipped=count == 0, loss_scale=scale)


def _exchanged(request: Replicas, layouts: StepLayout, requests: Requests, before: _Exchange) -> _Exchange:
    """Average the replicas. Masters are averaged in the layout of the update, then stored parameters are rounded."""
    axis, kept = request.axis, masters_of(requests)
    old, new, leaves = before.params, before.replica, list[PyTree]()
    if kept is not None:
        optimizer, leaves = split_state(before.optimizer, requests)
        own = leaves[requests.index(kept)]
        shards = [optree.tree_map(relayout_leaf, each, layouts.whole, layouts.update) for each in (old, new)]
        old, new = kept.full(shards[0], before.masters), kept.full(shards[1], own)

    def mean(old: Any, leaf: Any) -> Any:
        return pmean(leaf, axis) if is_trained(leaf) else old

    after, outer = optree.tree_map(mean, old, new), before.outer
    if request.outer is not None:
        gradients = optree.tree_map(lambda old, leaf: old - leaf if is_trained(leaf) else None, old, after)
        after, outer = request.outer.update(gradients, outer, old)
    if kept is None:
        return replace(before, params=after, replica=_varied(after, axis), outer=outer)

    def stored(x: Any, old: Any, update: P, whole: P) -> Any:
        return relayout_leaf(x.to(old.dtype), update, whole) if isinstance(x, torch.Tensor) else x

    masters = optree.tree_map(lambda a, x: x if isinstance(a, torch.Tensor) else a, before.masters, after)
    params = optree.tree_map(stored, after, before.params, layouts.update, layouts.whole)
    leaves[requests.index(kept)] = _varied(masters, axis)
    return _Exchange(params, _varied(params, axis), with_leaves(optimizer, requests, leaves), outer, masters)


def _varied(tree: PyTree, axis: str) -> PyTree:
    return optree.tree_map(lambda x: pvary(x, axis) if isinstance(x, torch.Tensor) else x, tree)


def _row(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, torch.Tensor) else leaf


def _as_row(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, torch.Tensor) else leaf


def _spec_of_row(spec: P) -> P:
    return spec.replace(spec.dims[1:], padded={dim - 1: size for dim, size in spec.padded.items()})
