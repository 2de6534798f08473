"""Save training states: the leaves of a state, written by the plan of `checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optree
import torch

from ..checkpoint import (
    Contents,
    Copies,
    LeafLayout,
    Save,
    SavePlan,
    begin_save,
    plan_save,
    position_to_json,
    require_only,
    tree_keys,
    tree_to_json,
)
from ..errors import CheckpointError
from ..requests import ScaleLoss
from ..runtime import Runtime, Where
from ..stateful import HeldLeaves, peers_of
from .finite import settle
from .saved import SavedLeaves, saved_leaves
from .states import States
from .train_state import StateLayout, TrainState


def save_state(
    states: States,
    state: TrainState,
    path: str | Path,
    *,
    data: Any,
    extra: Any,
    keep: int | None,
    copies: Copies | None,
    only: str | None,
) -> Save:
    """Begin to save a state. If its values are copied, training may continue. Every process calls it."""
    require_only(only)
    layout, runtime = states.known_layout(state), states.runtime_for(state)
    settle(states, state)
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra={extra!r}: a checkpoint has what JSON can hold ({error})") from None
    peers = peers_of(runtime)
    where = tuple(HeldLeaves(runtime, state.handles, layout.specs, runtime).where())
    leaves, plan = _plan(states, layout, where, only)
    left_out = [] if only is None else [leaf for leaf in leaves.tensors if _is_frozen(leaf, leaves)]
    numbers = {key: state.handles[index].value for key, index in leaves.numbers.items()}
    for key, value in numbers.items():
        if not isinstance(value, (bool, int, float)):
            raise CheckpointError(f"{key!r} is a {type(value).__name__}; a checkpoint has tensors and numbers")
    body = {
        "step": state.step,
        "seed": states.options.seed,
        "reduction": reduction_of(states, runtime),
        "loss_scale": _loss_scale(states, layout, state),
        "data_position": position_to_json(data, peers),
        "extra": extra,
        "tree": tree_to_json(optree.tree_structure(leaves.params).unflatten(tree_keys(leaves.params)), str),
        "batch": states.programs.batch_signature,
        "left_out": {
            f"{leaf.kind}/{leaf.key}": [leaf.shape, str(leaf.dtype).removeprefix("torch.")] for leaf in left_out
        },
    }

    def shard(index: int, rank: int) -> torch.Tensor:
        return runtime.shard_of(state.handles[index], layout.specs[index], rank)

    contents = Contents(plan, shard, numbers, body)
    return begin_save(peers, Path(path), contents, keep=keep, copies=copies)


def _plan(
    states: States, layout: StateLayout, where: tuple[Where, ...], only: str | None
) -> tuple[SavedLeaves, SavePlan]:
    """Return the leaves of a state and the plan to save them, or only the trained ones. They are computed once."""
    if (layout, where, only) not in states.plans:
        leaves = saved_leaves(states, layout, where.__getitem__)
        tensors = [leaf for leaf in leaves.tensors if only is None or not _is_frozen(leaf, leaves)]
        states.plans[layout, where, only] = leaves, plan_save(tensors, states.mesh)
    found: tuple[SavedLeaves, SavePlan] = states.plans[layout, where, only]
    return found


def _is_frozen(leaf: LeafLayout, leaves: SavedLeaves) -> bool:
    """Whether steps never change a leaf: a frozen parameter, or state of its shape that belongs to it."""
    return leaves.frozen.get(leaves.owners[f"{leaf.kind}/{leaf.key}"]) == leaf.shape


def reduction_of(states: States, runtime: Runtime[Any, Any]) -> str:
    """Return text that is equal for two runs if their sums have the same bits."""
    if states.options.reduction == "ordered" or runtime.is_simulated:
        return "ordered"
    return f"fast on {states.mesh} by {runtime.algorithm}"


def _loss_scale(states: States, layout: StateLayout, state: TrainState) -> float | None:
    _, indices = layout.trees(list(range(len(state.handles))))
    for each, held in zip(states.requests, states.split(indices)[1], strict=True):
        if isinstance(each, ScaleLoss):
            scale = states.runtime_for(state).whole(state.handles[held.scale], layout.specs[held.scale])
            return float(scale.min())  # replicas have one each
    return None
