"""Requests about the ranks of one axis: what they share, what they hold, and what they compute apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sharding_specs import Mesh

from ..functions import Applied, LocalFunction, PyTree, Request
from ..optim import Optimizer


@dataclass(frozen=True)
class DataAxis(Request):
    """Mark of an axis that shards the batch. Microbatches are cut along the dims that such axes shard."""

    axis: str

    def __str__(self) -> str:
        return f"batch sharded over {self.axis!r}"


@dataclass(frozen=True)
class Microbatches(Request):
    axis: str
    count: int | Callable[[Mesh], int]

    def virtual_axes(self, mesh: Mesh) -> Mapping[str, int]:
        return {self.axis: self.count(mesh) if callable(self.count) else self.count}

    def __str__(self) -> str:
        return f"{'scheduled' if callable(self.count) else self.count} microbatches"


@dataclass(frozen=True)
class Master(Request):
    axis: str
    rank: int  # index of the master along the axis

    def __str__(self) -> str:
        return f"training state on rank {self.rank} of {self.axis!r}"


def owners_of(applied: Applied) -> dict[str, int]:
    """Return the axes with a master, and its index along each: the `owner` of the specs of all training state."""
    return {each.axis: each.rank for each in applied.all(Master)}


class ReplicaState(NamedTuple):
    """State of a training step with replicas: `params`, `optimizer` and `loss` have one row per replica."""

    params: PyTree  # the replicas' parameters
    optimizer: PyTree  # the states of their optimizers
    outer: PyTree  # the state of the outer optimizer; None without one
    loss: Any  # (replicas,) sum of the losses since the last exchange
    steps: Any  # () int64, steps since the last exchange; with a loss scale (replicas,), those that made an update
    masters: PyTree = None  # masters of the last exchange, like a step's; None without


@dataclass(frozen=True)
class Replicas(Request):
    """Request that ranks of an axis train apart. `LocalTrainStep` is then the step of one replica."""

    axis: str
    inner: int
    outer: Optimizer | None
    loss: LocalFunction = field(repr=False)

    def __str__(self) -> str:
        return f"replicas over {self.axis!r}, which exchange every {self.inner} steps"
