"""Training steps of ranks that do not wait for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import Mesh, register_dataclasses, tree_paths

from .. import _torch
from ..errors import DonatedStateError, NonFiniteError
from ..functions import PyTree
from ..ir import is_trained, refuse_abstract
from ..runtime import ProcessRuntime, default_runtime, rank_name
from .async_state import AsyncMetrics, AsyncState
from .central import Central
from .clock import Clock
from .in_one_process import dropped_rank, finished, stepped
from .links import connected
from .protocol import Message, Node, Rules
from .rotating import Rotating
from .session import Session
from .worker import Computation


@dataclass(frozen=True)
class Method:
    name: str  # the call that made it, for messages
    staleness: int
    server: int | None  # None if the server rotates

    def target(self, rank: int) -> int:
        return rank if self.server is None else self.server

    def linked(self, ranks: int, rank: int) -> set[int]:
        if self.server is None or self.server == rank:
            return set(range(ranks)) - {rank}
        return {self.server}

    def nodes(self, rules: Rules, params: PyTree, optimizer: PyTree) -> Mapping[int, Node]:
        everyone = range(rules.ranks)
        if self.server is None:
            return {rank: Rotating(rules, rank, params, optimizer, frozenset(everyone)) for rank in everyone}
        return {self.server: Central(rules, self.server, params, optimizer, dict.fromkeys(everyone, 0))}


class AsyncStep:
    """Training step of ranks that do not wait for each other; see `parameter_server` and `rotating_server`.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.asynchronous.parameter_server(
    ...     lambda w, x: ((x - w) ** 2).mean(), fp.optim.sgd(0.5), Mesh(data=3), staleness=0)
    >>> state = step.init(torch.zeros(()))
    >>> state = step.drop(state, 2)                               # rank 2 dies; the others go on
    >>> for batch in (torch.tensor([1.0]), torch.tensor([4.0, 4.0])):
    ...     state, metrics = step(state, batch)
    >>> step.params(step.finish(state)), metrics.ended            # the mean of three samples
    (tensor(3.), ('rank 2 (data=2) died',))

    Args:
        computation: the programs of one rank.
        mesh: the mesh.
        method: how ranks exchange.
        clock: the clock of a simulated run.
    """

    def __init__(self, computation: Computation, mesh: Mesh, method: Method, clock: Clock) -> None:
        self.computation, self.mesh, self.method, self.clock = computation, mesh, method, clock
        self.rules = Rules(mesh.size, method.staleness, computation.update, computation.adds)
        clock.require(mesh.size)

    def __repr__(self) -> str:
        return f"{self.method.name} on {self.mesh!r}"

    def init(self, params: PyTree) -> AsyncState:
        """Return the first state. On processes, all of them call this with the same parameters, and connect."""
        register_dataclasses(params)
        params = optree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, params)
        refuse_abstract(params, f"{self.method.name}.init")
        runtime, work = default_runtime(self.mesh), self.computation.begin(params)
        nodes = self.method.nodes(self.rules, params, self.computation.servers.init(params))
        if not isinstance(runtime, ProcessRuntime):
            everyone = range(self.mesh.size)
            ready = {rank: self.clock.duration(rank, 0) for rank in everyone}
            return AsyncState(dict.fromkeys(everyone, work), nodes, ready, {})
        self.computation.warm(params)
        runtime.agree(f"starts {self!r}", "Build the step with the same arguments on every process")
        leaves = zip(tree_paths(params), optree.tree_leaves(params), strict=True)
        tensors = [(path or "parameters", x) for path, x in leaves if isinstance(x, torch.Tensor)]
        runtime.check_same(f"{self.method.name}.init", [path for path, _ in tensors], [x for _, x in tensors])
        rank, size = runtime.rank, self.mesh.size
        links = connected(rank, partial(self.method.linked, size), runtime.exchange)
        name, server = partial(rank_name, self.mesh), self.method.server
        limit = _torch.timeout_of_all_ranks()
        seconds = math.inf if limit is None else limit.total_seconds()
        session = Session(rank, links, nodes.get(rank), self._templates(params), name, server, seconds)
        session.latest = AsyncState({rank: work}, {}, {rank: 0.0}, {}, session=session)
        return session.latest  # type: ignore[no-any-return]

    def _templates(self, params: PyTree) -> dict[str, PyTree]:
        gradients = optree.tree_map(lambda x: x if is_trained(x) else None, params)
        turn = (params, self.computation.servers.init(params))
        weights = dict.fromkeys(("reply", "left", "final"), params)
        return {"push": gradients, "gradient": gradients, "turn": turn, **weights}

    def __call__(self, state: AsyncState, *batch: PyTree) -> tuple[AsyncState, AsyncMetrics]:
        """Run one step of one rank: of `state.rank`.

        Args:
            state: state from `init` or the step before.
            batch: arguments of the loss after the parameters: the rank's own samples. Their number may differ between
                ranks and steps.

        Returns:
            The new state, and the metrics.

        Raises:
            CollectiveError: if the parameter server died.
            NonFiniteError: for a loss that is not finite; no other rank sees anything of the step.
            DonatedStateError: on processes, for another state than the last state.
        """
        self._require_open(state)
        rank = state.rank
        work, loss, tree, weight = self.computation.take(state.work[rank], batch)
        if not bool(torch.isfinite(loss)):
            number, name = work.steps - 1, rank_name(self.mesh, rank)
            told = f"step {number} of {name} is not finite: loss {loss.item():.6g}. Nothing of it was sent"
            raise NonFiniteError(told, number, None, state, None)
        numbers = {"version": work.version, "weight": weight}
        push = None if tree is None else Message("push", rank, self.method.target(rank), tree, numbers)
        if state.session is None:
            after, metrics = stepped(state, work, loss, push, self.clock)
            return after, metrics._replace(ended=self.ended(after))
        return self._on_processes(state, rank, work, loss, push)

    def _on_processes(
        self, state: AsyncState, rank: int, work: Any, loss: torch.Tensor, push: Message | None
    ) -> tuple[AsyncState, AsyncMetrics]:
        session: Session = state.session
        metrics = AsyncMetrics(loss, rank, work.version, None, work.waited, session.seconds)
        if push is not None:
            reply = session.exchange(push)
            work = work.given(reply.tree, reply.numbers["version"], session.seconds - metrics.seconds)
            metrics = metrics._replace(**{key: reply.numbers[key] for key in ("version", "staleness", "dropped")})
        after = replace(state, work={rank: work}, seconds=metrics.seconds)
        session.latest = after
        return after, metrics._replace(ended=self.ended(after))

    def params(self, state: AsyncState) -> PyTree:
        """Return the parameters of a state, without communication.

        In a simulated run they are the newest of all ranks; on processes the newest that this process has. After
        `finish` they are the newest, the same on every rank.
        """
        if state.final is not None:
            return state.final[1]
        if state.session is not None:
            return next(iter(state.work.values())).params
        newest = max(state.nodes, key=lambda rank: (state.nodes[rank].weights[0], -rank))
        return state.nodes[newest].weights[1]

    def finish(self, state: AsyncState) -> AsyncState:
        """End this process's part, wait for the other ranks to end theirs, and return a state with the final weights.

        A rank that has ended stops no other. In a simulated run, all ranks end now.

        Raises:
            CollectiveError: if the parameter server died.
        """
        self._require_open(state)
        leave = [Message("left", rank, self.method.target(rank)) for rank in state.work]
        if state.session is None:
            return finished(state, leave, self.clock)
        session: Session = state.session
        reply = session.exchange(leave[0])
        after = replace(state, final=(reply.numbers["version"], reply.tree))
        session.latest = after
        session.close()
        return after

    def drop(self, state: AsyncState, rank: int) -> AsyncState:
        """Return the state of a simulated run after a rank has died.

        Raises:
            CollectiveError: for the rank of the parameter server.
            ValueError: for a rank that does not take part, or on processes.
        """
        if state.session is not None:
            raise ValueError(f"{self.method.name}: drop is for simulated ranks; a process that ends is noticed")
        return dropped_rank(state, rank, self.clock)

    def ended(self, state: AsyncState) -> tuple[str, ...]:
        """Return the ranks that have died or left, by name, as far as this process knows."""
        source = next(iter(state.nodes.values())) if state.session is None else state.session
        ended: Mapping[int, str] = source.ended
        return tuple(f"{rank_name(self.mesh, rank)} {how}" for rank, how in sorted(ended.items()))

    def _require_open(self, state: AsyncState) -> None:
        if not isinstance(state, AsyncState):
            raise TypeError(f"{self.method.name} takes a state from its init, not {type(state).__name__}")
        if state.final is not None:
            raise ValueError(f"{self.method.name}: this run is finished; begin another by init(step.params(state))")
        if state.session is not None and state.session.latest is not state:
            raise DonatedStateError(
                f"{self.method.name}: other ranks have gone on from this state, of step {state.step}: use the state "
                "that the last step returned"
            )
