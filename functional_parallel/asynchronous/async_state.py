"""States and metrics of asynchronous training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .protocol import Node
from .worker import Work


class AsyncMetrics(NamedTuple):
    """Results of one step of one rank.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.asynchronous.parameter_server(
    ...     lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.5), Mesh(data=2), staleness=1,
    ...     clock=fp.asynchronous.Clock(jitter=0.0))
    >>> state = step.init(torch.zeros(()))
    >>> for _ in range(2):
    ...     state, metrics = step(state, torch.ones(2))
    ...     print(metrics.rank, metrics.version, metrics.staleness, metrics.loss)
    0 1 0 tensor(1.)
    1 2 1 tensor(1.)

    Attributes:
        loss: the loss of this rank's batch, at the weights that the rank had.
        rank: the rank.
        version: number of updates before the weights that the rank has now.
        staleness: the largest number of updates between the weights of a gradient and the update that used it, of the
            updates that this step completed. None if it completed none.
        waited: seconds that the rank had waited for these weights.
        seconds: time of the end of the step, since the start.
        dropped: number of gradients that this rank's turn did not use, because they came too late for the bound.
        ended: the ranks that have died or left, by name.
    """

    loss: Any
    rank: int
    version: int
    staleness: int | None
    waited: float
    seconds: float
    dropped: int = 0
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class AsyncState:
    """State of a run. Of a simulated run, it is the state of all ranks, and a value: any state can be gone on from.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> clock = fp.asynchronous.Clock(jitter=0.0)
    >>> step = fp.asynchronous.rotating_server(lambda w, x: (w * x).sum(), fp.optim.sgd(0.5), Mesh(data=2), clock=clock)
    >>> state = step.init(torch.zeros(()))
    >>> state.rank, state.step
    (0, 0)
    >>> step(state, torch.ones(2))[0]
    AsyncState(step=1, seconds=1.000, versions={0: 1, 1: 0})

    Attributes:
        work: the training loops of the ranks that take part: all in a simulated run, else this process's.
        nodes: values that ranks hold for others, in a simulated run.
        ready: when each rank that is at work will be done, in seconds.
        waiting: when each rank that waits for a reply began to.
        seconds: the time.
        session: the connections of this process; None in a simulated run.
        final: version and parameters at the end; None before `finish`.
    """

    work: Mapping[int, Work]
    nodes: Mapping[int, Node]
    ready: Mapping[int, float]
    waiting: Mapping[int, float]
    seconds: float = 0.0
    session: Any = None
    final: Any = None

    @property
    def step(self) -> int:
        """Number of steps done, of all ranks of a simulated run, else of this process."""
        return sum(each.steps for each in self.work.values())

    @property
    def rank(self) -> int:
        """The rank of the next step: in a simulated run the rank that finishes first, else this process's rank."""
        return min(self.ready, key=lambda rank: (self.ready[rank], rank))

    def __repr__(self) -> str:
        versions = {rank: each.version for rank, each in self.work.items()}
        return f"AsyncState(step={self.step}, seconds={self.seconds:.3f}, versions={versions})"
