"""Requests that add leaves to the state of a training step, beside the optimizer's, and the tree of that state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from sharding_specs import Mesh, P, broadcast_specs

from ..functions import Applied, BufferTree, PyTree, Request, SpecTree

_TREES: set[type[Any]] = set()  # of all requests


class UpdateLayouts(Protocol):
    """The layouts of a step, as requests read them; see `StepLayout`."""

    @property
    def mesh(self) -> Mesh: ...

    def trained(self) -> Mapping[str, tuple[torch.Tensor, P]]:
        """Return the parameters that are trained, without values, and their specs in the update, by path."""

    def like_params(self, tree: PyTree) -> SpecTree:
        """Return the specs of a tree that is like the parameters."""


@dataclass(frozen=True)
class Update:
    """Update of one step on a rank's shards, as the hooks of requests read and change it."""

    params: PyTree
    state: PyTree
    old_params: PyTree
    old_state: PyTree
    stored: PyTree  # the rank's shards of the parameters as they are stored
    norm: torch.Tensor | None  # of all gradients; None if nothing needs it
    sums: PyTree = None  # gradients as they are summed over ranks, with a loss scale in them
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of all requests


class StateRequest(Request):
    """Request with leaves in the state of a training step. Each hook's default changes nothing.

    A request that only changes parameters or gradients has no `tree`, and its hooks are given None for the leaves.
    """

    tree: ClassVar[type[Any] | None] = None  # named tuple of the optimizer's state without this request, and its leaves
    saved: ClassVar[bool] = True  # whether a checkpoint saves the leaves, or `init` computes them from the parameters
    passed: ClassVar[bool] = False  # whether the loss takes the leaves after the parameters, and returns new ones
    optional: ClassVar[bool] = True  # whether a checkpoint without the leaves can be restored; they are then the first
    may_skip: ClassVar[bool] = False  # whether it may skip an update, by the norm of the gradients

    def __init_subclass__(cls) -> None:
        if cls.tree is not None:
            _TREES.add(cls.tree)

    def owns(self, key: str) -> bool:
        """Whether the leaf of a checkpoint with this key is one of the request."""
        return key.startswith(f"~{type(self).__name__}/")

    # --- parameters between steps, full ---

    def trained(self, params: PyTree) -> PyTree:
        return params

    def stored(self, params: PyTree) -> PyTree:
        return params

    def init(self, params: PyTree, applied: Applied, layouts: UpdateLayouts) -> PyTree:
        """Return the leaves of the first state, from the parameters of `trained` and the layout of the loss."""
        return None

    def specs(self, leaves: PyTree, layouts: UpdateLayouts) -> SpecTree:
        """Return the specs of the leaves."""
        return broadcast_specs(P(), leaves)

    def resize_rule(self) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] | None:
        """Return a function of an old leaf and the new shape, if the shapes of leaves depend on the mesh."""
        return None

    def full(self, params: PyTree, leaves: PyTree) -> PyTree:
        """Return the user's parameters, from stored parameters and the leaves."""
        return params

    # --- in a step, on a rank's shards ---

    def returned(self, new: PyTree, specs: SpecTree, leaves: PyTree) -> PyTree:
        """Return the new leaves, in full, from the loss's returned leaves, with their specs, if it `passed` them."""
        return leaves

    def loss(self, value: torch.Tensor, leaves: PyTree) -> torch.Tensor:
        return value

    def gradients(self, gradients: PyTree, leaves: PyTree) -> PyTree:
        return gradients

    def weights(self, params: PyTree, leaves: PyTree) -> PyTree:
        return params

    def updated(self, update: Update, leaves: PyTree) -> tuple[Update, PyTree]:
        return update, leaves

    def metrics(self, norm: torch.Tensor | None, leaves: PyTree) -> dict[str, Any]:
        """Return the metrics of the step that the request computes. `leaves` are the leaves before the step."""
        return {}

    def check(self, leaves: PyTree) -> None:
        """Raise if the leaves, full tensors, show that training failed."""


def state_requests(applied: Applied) -> tuple[StateRequest, ...]:
    return applied.all(StateRequest)


def loss_arguments(requests: Sequence[StateRequest], leaves: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """Return the arguments of a loss between the parameters and the batch: the leaves that it is passed."""
    return tuple(BufferTree(held or {}) for each, held in zip(requests, leaves, strict=True) if each.passed)


def with_leaves(state: PyTree, requests: Sequence[StateRequest], leaves: Sequence[PyTree]) -> PyTree:
    """Return the state of a step: the optimizer's state with the leaves of each request, the first innermost."""
    for each, held in zip(requests, leaves, strict=True):
        state = state if each.tree is None else each.tree(state, held)
    return state


def converted_state(state: PyTree, requests: Sequence[StateRequest], init: Callable[[StateRequest], PyTree]) -> PyTree:
    """Return a state with the leaves of these requests. Leaves of other requests are dropped; `init` makes new ones."""
    found = dict[Any, PyTree]()
    while type(state) in _TREES:
        found[type(state)] = state[1]
        state = state[0]
    return with_leaves(state, requests, [found[each.tree] if each.tree in found else init(each) for each in requests])


def split_state(state: PyTree, requests: Sequence[StateRequest]) -> tuple[PyTree, list[PyTree]]:
    """Return the optimizer's part of a state, and the leaves of each request. A request without leaves has None."""
    leaves: list[PyTree] = [None] * len(requests)
    for index in reversed(range(len(requests))):
        if requests[index].tree is not None:
            state, leaves[index] = state
    return state, leaves
