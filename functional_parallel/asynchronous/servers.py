"""The two asynchronous methods: a parameter server, and a server that rotates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharding_specs import Mesh

from ..functions import LocalFunction, explain_keywords
from ..optim import Optimizer
from ..quantities import is_positive_int
from ..training import require_arguments
from .async_step import AsyncStep, Method
from .clock import Clock
from .worker import Computation


@explain_keywords
def parameter_server(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    mesh: Mesh,
    plan: Callable[..., Any] | None = None,
    *,
    staleness: int,
    server: int = 0,
    inner: int = 1,
    outer: Optimizer | None = None,
    reduce: str = "mean",
    clock: Clock | None = None,
) -> AsyncStep:
    """Train on ranks that push gradients to a server and take its newest weights, each at its own pace.

    The staleness of a gradient is the number of updates between its weights and the update that uses it. It is never
    above the bound: an update that would make a gradient at work too old waits for that gradient. With a bound of 0
    each update uses one gradient of every rank, added in rank order: synchronous training.

    Asynchronous training converges worse with more ranks and a larger bound. Measure it for your model.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.asynchronous.parameter_server(
    ...     lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.05), Mesh(data=3), staleness=8,
    ...     clock=fp.asynchronous.Clock(seconds=(1.0, 1.0, 5.0)),
    ... )
    >>> state, ages = step.init(torch.zeros(())), []
    >>> for _ in range(40):
    ...     state, metrics = step(state, torch.ones(4))           # one step of the rank that is done next
    ...     ages.append(metrics.staleness)
    >>> state = step.finish(state)
    >>> step.params(state).round(decimals=1), max(age for age in ages if age is not None)
    (tensor(1.), 8)

    Args:
        loss: `loss(params, *batch) -> scalar`, of the samples of one rank.
        optimizer: optimizer of the server; with `outer`, of each rank's inner steps.
        mesh: the mesh. Every rank trains; axes only give names.
        plan: transforms without mesh axes, such as `fp.remat()`.
        staleness: the bound, a number of updates. To never wait for a rank that is k times slower than each of n
            others, take at least k · n.
        server: rank of the server, which trains too.
        inner: number of steps of a rank between two exchanges, with `outer`.
        outer: optimizer of the server for the difference that a rank's inner steps made. Asynchronous DiLoCo; with
            `fp.optim.sgd(1.0)` asynchronous local SGD.
        reduce: "mean" if the loss is a mean over samples, "sum" if it is a sum.
        clock: durations of the steps of simulated ranks. By default all ranks are equally fast, with some jitter.

    Returns:
        The step. `state = step.init(params)`, `state, metrics = step(state, *batch)`, `step.params(state)`, and at the
        end `step.finish(state)`. On processes each process calls it with its own batches, at its own pace. In a
        simulated run one call is one step of one rank, `state.rank`, by the clock, and a run replays exactly.

        A rank that dies is named in `metrics.ended`, and the others go on. If the server dies, all raise
        CollectiveError.

    Raises:
        TypeError, ValueError: for arguments that do not go together.
    """
    name = "fp.asynchronous.parameter_server"
    _require_staleness(name, staleness)
    if isinstance(server, bool) or server not in range(mesh.size):
        raise ValueError(f"{name}(server={server!r}): it is a rank of {mesh!r}, from 0 to {mesh.size - 1}")
    if not is_positive_int(inner) or (inner > 1 and outer is None):
        raise ValueError(
            f"{name}(inner={inner!r}): it is a number of inner steps, 1 or more; more than 1 need outer=, the "
            "optimizer of the difference that they made, such as fp.optim.sgd(1.0)"
        )
    planned = _planned(name, loss, optimizer, mesh, plan, reduce)
    computation = Computation(planned, optimizer, outer, int(inner), reduce == "sum")
    chosen = f"staleness={staleness}, server={server}, inner={inner}, outer={outer!r}, reduce={reduce!r}"
    return AsyncStep(computation, mesh, Method(f"{name}({chosen})", int(staleness), int(server)), clock or Clock())


@explain_keywords
def rotating_server(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    mesh: Mesh,
    plan: Callable[..., Any] | None = None,
    *,
    staleness: int | None = None,
    reduce: str = "mean",
    clock: Clock | None = None,
) -> AsyncStep:
    """Train on ranks that each have weights, and take turns in collecting the other ranks' gradients.

    The rank whose turn it is updates its weights by its own gradient and by those that have arrived. The others go on
    with theirs. Then the turn moves to the next rank. No rank waits, and none is needed by all. Weights of ranks drift
    apart, so convergence suffers with more ranks.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.asynchronous.rotating_server(
    ...     lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.25), Mesh(data=3))
    >>> state = step.init(torch.zeros(()))
    >>> for _ in range(60):
    ...     state, metrics = step(state, torch.ones(4))
    >>> step.params(step.finish(state)).round(decimals=1)
    tensor(1.)

    Args:
        loss, optimizer, mesh, plan, reduce, clock: as for `parameter_server`.
        staleness: the bound on the number of turns since the weights of a gradient were updated. The default is the
            number of ranks, which the method keeps by itself; a later gradient is dropped and counted. With 0 the rank
            whose turn it is waits for a gradient of every rank, and sends its weights and optimizer state to all:
            synchronous training. Numbers between these are refused.

    Returns:
        The step, as from `parameter_server`. `step.params(state)` in a simulated run are the weights of the last turn.
        If a rank dies, the turn passes over it and the others go on.

    Raises:
        TypeError, ValueError: for arguments that do not go together.
    """
    name, bound = "fp.asynchronous.rotating_server", mesh.size if staleness is None else staleness
    _require_staleness(name, bound, mesh.size)
    computation = Computation(_planned(name, loss, optimizer, mesh, plan, reduce), optimizer, None, 1, reduce == "sum")
    chosen = f"staleness={bound}, reduce={reduce!r}"
    return AsyncStep(computation, mesh, Method(f"{name}({chosen})", int(bound), None), clock or Clock())


def _planned(
    name: str, loss: Callable[..., Any], optimizer: Optimizer, mesh: Mesh, plan: Callable[..., Any] | None, reduce: str
) -> Callable[..., Any]:
    require_arguments(loss, optimizer, mesh, plan)
    if reduce not in ("mean", "sum"):
        raise ValueError(f"{name}(reduce={reduce!r}): it is 'mean' or 'sum', as the loss is of its samples")
    planned = loss if plan is None else plan(loss)
    if isinstance(planned, LocalFunction) and (taken := [axis for axis in planned.applied.axes if axis in mesh.shape]):
        raise ValueError(
            f"{name}: {planned!r} splits work over {taken[0]!r}, and here each rank computes alone: take transforms "
            "without a mesh axis, such as fp.remat(), or train synchronously with fp.train_step"
        )
    return planned


def _require_staleness(name: str, staleness: Any, least: int = 0) -> None:
    is_zero = staleness == 0 and not isinstance(staleness, bool)
    if not is_zero and (not is_positive_int(staleness) or staleness < least):
        more = f"0, or at least {least}, the number of ranks" if least else "an integer of at least 0"
        raise ValueError(f"{name}(staleness={staleness!r}): the bound is a number of updates, {more}")
