"""State of a training run, which a step reads, returns and may donate, and the layout of that state."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn, SupportsIndex, TypeVar

import optree
import torch

from sharding_specs import Mesh, P, tree_paths

from .. import _torch
from ..functions import PyTree
from ..ir import LeafSignature, current_source, leaf_signature, warn_at
from ..stateful import Held, structure_as_text
from .local_step import Metrics
from .update import StepLayout

T = TypeVar("T")

_MANY_RECORDED = 32


def detach_leaf(leaf: T) -> T | torch.Tensor:
    """Detach a leaf tensor. A parameter that requires a gradient would make autograd keep the graph of every step."""
    if isinstance(leaf, torch.Tensor) and leaf.is_leaf and not _torch.is_functorch_wrapped(leaf):
        return leaf.detach()
    return leaf


@dataclass(eq=False)
class StateLayout:
    """Layout of a state. A step's program is compiled for a state layout and a batch signature.

    Layouts are compared by identity, which is free at each step. A step keeps one layout per `key`.
    """

    mesh: Mesh
    layouts: StepLayout
    params: optree.PyTreeSpec  # as the step holds them
    state: optree.PyTreeSpec
    specs: tuple[P, ...]  # of each leaf
    signatures: tuple[LeafSignature, ...]  # of each leaf as a full tensor
    states: Any  # of the step that made it, which map the leaves to the user's trees

    @cached_property
    def key(self) -> Hashable:
        """Key that is equal for two layouts if one program accepts both states."""
        return (self.mesh, self.params, self.state, self.specs, self.signatures, self.layouts.packing.groups)

    def trees(self, leaves: list[Any]) -> tuple[PyTree, PyTree]:
        """Return the trees of the parameters and of the optimizer state, with these leaves."""
        count = self.params.num_leaves
        return self.params.unflatten(leaves[:count]), self.state.unflatten(leaves[count:])

    def difference(self, other: StateLayout) -> str:
        """Describe the first difference between this layout and `other`, the layout of a step, for a message."""
        if self.mesh != other.mesh:
            return f"it lies on {self.mesh!r}, the step's on {other.mesh!r}"
        for kind in ("params", "state"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            if mine != theirs:
                what = "parameters" if kind == "params" else "an optimizer state"
                return f"it has {what} {structure_as_text(mine)}, the step's {structure_as_text(theirs)}"
        for path, mine, theirs in zip(self._paths(), self._lies(), other._lies(), strict=True):
            if mine != theirs:
                return f"{path or 'the parameter'} is {mine} in it, {theirs} in the step's"
        return "its parameters are put into other vectors for the update"

    def path(self, index: int) -> str:
        """Return the path of a leaf, for messages."""
        return self._paths()[index] or "the parameter"

    def _paths(self) -> list[str]:
        params, state = self.trees(list(self.specs))
        return [*tree_paths(params), *(f"optimizer state, {path}" for path in tree_paths(state))]

    def _lies(self) -> list[str]:
        return [f"{look} as {spec!r}" for look, spec in zip(self.signatures, self.specs, strict=True)]


def state_layout(states: Any, layouts: StepLayout, params: PyTree, state: PyTree, specs: tuple[P, ...]) -> StateLayout:
    """Return the layout of a state with these full parameters and this packed optimizer state."""
    signatures = tuple(map(leaf_signature, optree.tree_leaves((params, state))))
    structures = optree.tree_structure(params), optree.tree_structure(state)
    return StateLayout(states.mesh, layouts, *structures, specs, signatures, states)


def recorded_steps(before: int, loss: torch.Tensor | None) -> int:
    """Count consecutive steps with a graph kept by autograd, after a step with this loss. Warn at `_MANY_RECORDED`."""
    if loss is None or not loss.requires_grad:
        return 0
    if before + 1 == _MANY_RECORDED:
        warn_at(
            current_source(),
            f"the last {_MANY_RECORDED} steps took a batch, or began with parameters, that require a gradient, and the "
            "state keeps the graph of each for a derivative through them: memory grows with every step. Where none is "
            "wanted, as of a batch that another model computed, give x.detach()",
            RuntimeWarning,
        )
    return before + 1


class Watched(NamedTuple):
    """Step on a device, with a flag that the next step checks."""

    step: int
    metrics: Metrics
    flag: torch.Tensor  # in main memory, valid after `copied`
    copied: torch.cuda.Event


class TrainState(Held):
    """Parameters and optimizer state as the runtime holds them, sharded.

    Attributes:
        whose: text for messages that states where parameters and state originate. It is equal on every rank.
        recorded: number of steps before this state with a graph kept by autograd.
        counts: update counts known on the host, as passed to `counted_on_host`. None if the host cannot count.
        watched: the last step, if its loss is on a device and has not been checked yet.
        as_argument: text for the error about a state that is passed as parameters, or in a batch.
    """

    as_argument: ClassVar = "in whose place train.params(state) goes, its parameters, whole"

    __slots__ = ("_form", "_step", "counts", "recorded", "watched", "whose")

    def __init__(self, step: int, handles: tuple[Any, ...], layout: StateLayout, whose: str, recorded: int = 0) -> None:
        super().__init__(handles)
        self._step, self._form, self.whose = step, layout, whose
        self.recorded = recorded
        self.watched: Watched | None = None
        self.counts: dict[str, int] | None = {}

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._step

    @property
    def layout(self) -> StateLayout:
        """Layout of the state."""
        return self._form

    def _donated(self, failure: str) -> str:
        if failure:
            return (
                f"this state, of step {self.step}, was given to a step that failed ({failure}) and may have written "
                "over part of it: begin again from what was saved, on all ranks. To have a state that a failure leaves "
                "as it is, build the step by train_step(donate=False), at the price of a second copy of parameters and "
                "optimizer state"
            )
        return (
            f"this state, of step {self.step}, was given to a step, which wrote the next state into its memory. Use "
            "the state that the step returned; to keep an old one, give the step train.copy(state), or build it by "
            "train_step(donate=False), at the price of a second copy of parameters and optimizer state"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a TrainState is what this process holds of a run, its rank's parts alone: save "
            "(*train.whole(state), state.step), which all ranks call, and go on from train.load(*saved), on any mesh; "
            "train.copy(state) keeps one in memory"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return TrainState(self.step, deepcopy(self.handles, memo), self.layout, self.whose, self.recorded)

    def __repr__(self) -> str:
        held = f"parameters={self.layout.params.num_leaves}, mesh={self.layout.mesh!r}"
        return f"TrainState(step={self.step}, {held}{', donated' if self._handles is None else ''})"
