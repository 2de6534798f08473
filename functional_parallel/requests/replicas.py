"""Request to train a replica of the parameters on each rank of an axis, and to average the replicas every few steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..functions import LocalFunction, PyTree, Request
from ..optim import Optimizer

__all__ = ["ReplicaState", "Replicas"]


class ReplicaState(NamedTuple):
    """State of a training step with replicas. The leaves of `params`, `optimizer` and `loss` have one row per replica.

    The parameters of the training state are those of the last exchange.
    """

    params: PyTree  # the replicas' parameters
    optimizer: PyTree  # the states of their optimizers
    outer: PyTree  # the state of the outer optimizer; None without one
    loss: Any  # (replicas,) sum of the losses since the last exchange
    steps: Any  # () int64, number of steps since the last exchange


@dataclass(frozen=True)
class Replicas(Request):
    """Request that ranks of an axis train apart. `LocalTrainStep` is then the step of one replica.

    Attributes:
        axis: the mesh axis.
        inner: number of steps from one exchange to the next.
        outer: optimizer of the difference that the steps made; None to take the mean of the replicas.
        loss: the loss of one replica, which is not local over the axis.
    """

    axis: str
    inner: int
    outer: Optimizer | None
    loss: LocalFunction = field(repr=False)

    def __str__(self) -> str:
        return f"replicas over {self.axis!r}, which exchange every {self.inner} steps"
