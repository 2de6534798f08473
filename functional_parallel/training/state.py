"""The state of a training run: what a step takes and returns, and may use up; and how it lies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import optree
import torch

from sharding_specs import Mesh, P, tree_paths

from .. import _torch
from ..functions import PyTree
from ..runtime import OverlapError
from .signatures import leaf_signature, on_one_line, signature_text, structure_as_text
from .update import StepLayout

__all__ = [
    "DonatedStateError",
    "StateLayout",
    "StaticLeaf",
    "TrainState",
    "detach_leaf",
    "recorded_steps",
    "state_layout",
]

_MANY_RECORDED = 32
_MOST_OF_A_FAILURE = 200  # characters; the error itself was raised


def detach_leaf(leaf: Any) -> Any:
    """A module's parameter without what it asks of autograd, which would keep every step; all else is itself."""
    is_parameter = isinstance(leaf, torch.Tensor) and leaf.is_leaf and not _torch.is_functorch_wrapped(leaf)
    return leaf.detach() if is_parameter else leaf


@dataclass(frozen=True)
class StaticLeaf:
    """A leaf of the parameters that is no tensor, in the place of a handle."""

    value: Any


@dataclass(eq=False)
class StateLayout:
    """How a state lies: what a step's program is made for, beside the batch.

    Forms are compared by identity, which costs a step nothing; a step keeps one of each `key`.

    Attributes:
        mesh: the mesh.
        places: how parameters and state lie.
        params, state: the trees of parameters and of the optimizer's state, as the step holds them.
        specs: how each leaf lies.
        looks: what each leaf is, whole.
    """

    mesh: Mesh
    places: StepLayout
    params: Any
    state: Any
    specs: tuple[P, ...]
    looks: tuple[Any, ...]

    @cached_property
    def key(self) -> Any:
        """What two states share that one program takes."""
        return (self.mesh, self.params, self.state, self.specs, self.looks, self.places.packing.groups)

    def trees(self, leaves: list[Any]) -> tuple[PyTree, PyTree]:
        """Parameters, and the optimizer's state."""
        count = self.params.num_leaves
        return self.params.unflatten(leaves[:count]), self.state.unflatten(leaves[count:])

    def difference(self, other: StateLayout) -> str:
        """Where another form differs first, said of this one."""
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

    def _paths(self) -> list[str]:
        params, state = self.trees(list(self.specs))
        return [*tree_paths(params), *(f"optimizer state, {path}" for path in tree_paths(state))]

    def _lies(self) -> list[str]:
        return [f"{signature_text(look)} as {spec!r}" for look, spec in zip(self.looks, self.specs, strict=True)]


def state_layout(mesh: Mesh, places: StepLayout, params: PyTree, state: PyTree, specs: tuple[P, ...]) -> StateLayout:
    """The form of whole parameters and a packed state."""
    looks = tuple(map(leaf_signature, optree.tree_leaves((params, state))))
    return StateLayout(mesh, places, optree.tree_structure(params), optree.tree_structure(state), specs, looks)


def recorded_steps(before: int, loss: torch.Tensor) -> int:
    """Of how many steps autograd keeps the graph, after one with this loss; says so when they become many."""
    if not loss.requires_grad:
        return 0
    if before + 1 == _MANY_RECORDED:
        warnings.warn(
            f"the last {_MANY_RECORDED} steps took a batch, or began with parameters, that require a gradient, and the "
            "state keeps the graph of each for a derivative through them: memory grows with every step. Where none is "
            "wanted, as of a batch that another model computed, give x.detach()",
            RuntimeWarning,
            stacklevel=3,
        )
    return before + 1


class DonatedStateError(RuntimeError):
    """A state that was given to a step, and whose memory now holds a later one, or part of one."""


class TrainState:
    """Parameters and optimizer state as the runtime holds them, sharded.

    Attributes:
        whose: says of its parameters and state where they began, in the same words on every rank.
        recorded: of how many steps up to it autograd keeps the graph.
        counts: the numbers of updates that the host knows, as `counted_on_host` takes them; None where it cannot count.
        watched: the last step, where its loss is on a device and nothing has looked at it yet.
        as_argument: what an error says of one that is given to a function as its parameters, or in a batch.
    """

    as_argument: ClassVar = "in whose place train.params(state) goes, its parameters, whole"

    __slots__ = ("_failure", "_form", "_handles", "_step", "counts", "recorded", "watched", "whose")

    def __init__(self, step: int, handles: tuple[Any, ...], form: StateLayout, whose: str, recorded: int = 0) -> None:
        self._step, self._form, self.whose, self._failure = step, form, whose, ""
        self.recorded = recorded
        self.watched: Any = None
        self.counts: dict[str, int] | None = {}
        self._handles: tuple[Any, ...] | None = handles

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._step

    @property
    def form(self) -> StateLayout:
        """How it lies."""
        return self._form

    @property
    def handles(self) -> tuple[Any, ...]:
        """What the runtime holds per leaf.

        Raises:
            DonatedStateError: when a step has used them up.
        """
        if self._handles is None and self._failure:
            raise DonatedStateError(
                f"this state, of step {self.step}, was given to a step that failed ({self._failure}) and may have "
                "written over part of it: begin again from what was saved, on all ranks. To have a state that a "
                "failure leaves as it is, build the step by train_step(donate=False), at the price of a second copy "
                "of parameters and optimizer state"
            )
        if self._handles is None:
            raise DonatedStateError(
                f"this state, of step {self.step}, was given to a step, which wrote the next state into its memory. "
                "Use the state that the step returned; to keep an old one, give the step train.copy(state), or build "
                "it by train_step(donate=False), at the price of a second copy of parameters and optimizer state"
            )
        return self._handles

    def give(self) -> tuple[Any, ...]:
        """The handles, for good."""
        handles = self.handles
        self._handles = None
        return handles

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a TrainState is what this process holds of a run, its rank's parts alone: save "
            "(*train.whole(state), state.step), which all ranks call, and go on from train.load(*saved), on any mesh; "
            "train.copy(state) keeps one in memory"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return TrainState(self.step, deepcopy(self.handles, memo), self.form, self.whose, self.recorded)

    @contextmanager
    def used_by_a_step(self, given: tuple[Any, ...]) -> Iterator[None]:
        """Around the step: one that is refused gives back what it was given; of one that fails is kept why."""
        try:
            yield
        except OverlapError:
            self._handles = given
            raise
        except BaseException as error:
            if self._handles is None:
                self._failure = on_one_line(f"{type(error).__name__}: {error}")[:_MOST_OF_A_FAILURE]
            raise

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}{', donated' if self._handles is None else ''})"
