"""Runs a pipeline: every rank of its axis the actions that the schedule gives it, values passed on between them.

Around a mesh's runtime, which runs each single program over the other axes. With simulated ranks all ranks of the
pipeline are in this process and a message is a value put into another's hands; with real ones this process is one rank,
and messages are sends and receives that do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sharding_specs import Mesh, P

from ..pipelines import Exchange, PipelineProgram
from ..schedules import Action
from ..schedules.dependencies import replay
from ..schedules.messages import Receive, Send, messages
from ..tracing import Aval
from .mail import Mail
from .worker import Worker

__all__ = ["PipelineRuntime", "Placed"]


@dataclass(frozen=True)
class Placed:
    """A value that some ranks of a pipeline hold.

    Attributes:
        parts: the ranks' parts, of those ranks that are in this process.
        holders: the ranks that hold it; None for all.
        aval: its shape and dtype on one rank.
    """

    parts: dict[int, Any]
    holders: frozenset[int] | None
    aval: Aval


class PipelineRuntime:
    """Runs pipelines over one axis of a mesh.

    Args:
        base: the mesh's own runtime.
        axis: the axis of the pipeline.
    """

    def __init__(self, base: Any, axis: str) -> None:
        self.base, self.axis = base, axis
        self.mesh: Mesh = base.mesh
        self.size = self.mesh.axis_size(axis)
        self.carrier = getattr(base, "carrier", None)
        self.agree, self.exchange = base.agree, base.exchange
        own = None if self.carrier is None else self.mesh.coordinates(base.rank)[axis]
        self.ranks = tuple(range(self.size)) if own is None else (own,)

    # --- handles ---

    def shard(self, x: torch.Tensor, spec: P) -> Placed:
        """A whole tensor, on every rank of the pipeline until a step says which of them need it."""
        return self._everywhere(self.base.shard(x, spec))

    def own(self, x: torch.Tensor, spec: P) -> Placed:
        """A part that this process was given as its own."""
        return self._everywhere(self.base.own(x, spec))

    def whole(self, placed: Placed, spec: P) -> torch.Tensor:
        """The whole tensor."""
        if placed.holders is None or placed.holders >= frozenset(range(self.size)):
            return self.base.whole(next(iter(placed.parts.values())), spec)
        source = min(placed.holders)
        if self.carrier is None:
            return self.base.whole(placed.parts[source], spec)
        mine = placed.parts.get(self.ranks[0])
        if mine is None:
            mine = torch.empty(placed.aval.shape, dtype=placed.aval.dtype, device=self.base.device)
        with self.carrier.bound():
            return self.base.whole(self.carrier.pbroadcast(mine, (self.axis,), source), spec)

    def like(self, placed: Placed, spec: P) -> torch.Tensor:
        """A tensor of the whole shape, without memory for it."""
        for part in placed.parts.values():
            return self.base.like(part, spec)
        empty = torch.empty((), dtype=placed.aval.dtype).expand(placed.aval.shape)
        return self.base.like(empty if self.carrier is not None else [empty], spec)

    def check_same(self, name: str, paths: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Make sure that every rank was given the same whole tensors."""
        self.base.check_same(name, paths, tensors)

    def _everywhere(self, handle: Any) -> Placed:
        tensor = handle if isinstance(handle, torch.Tensor) else handle[0]
        aval = Aval(tuple(tensor.shape), tensor.dtype, tensor.device)
        return Placed(dict.fromkeys(self.ranks, handle), None, aval)

    # --- running ---

    def run_whole(self, program: PipelineProgram, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a pipeline on whole inputs, and make its results whole."""
        if self.carrier is not None:
            self.base.agree_on(program)
            self.base.agree_on_inputs(program, tensors)
        placed = [self.shard(x, spec) for x, spec in zip(tensors, program.in_specs, strict=True)]
        results = self.run(program, placed)
        return [self.whole(x, spec) for x, spec in zip(results, program.out_specs, strict=True)]

    def run(self, program: PipelineProgram, placed: Sequence[Placed]) -> list[Placed]:
        """Run a pipeline on sharded inputs."""
        if self.carrier is not None:
            self.base.agree_on(program)
        ordered = self.carrier is None or self.carrier.reduction == "ordered"
        workers = {
            rank: Worker(program, rank, self.base, self._inputs(program, placed, rank), ordered) for rank in self.ranks
        }
        for worker in workers.values():
            worker.begin()
        if self.carrier is None:
            self._in_lockstep(program, workers)
        else:
            self._as_one_rank(program, workers[self.ranks[0]])
        return self._results(program, workers)

    def _inputs(self, program: PipelineProgram, placed: Sequence[Placed], rank: int) -> dict[fx.Node, Any]:
        return {node: each.parts[rank] for node, each in zip(program.inputs, placed, strict=True) if rank in each.parts}

    def _in_lockstep(self, program: PipelineProgram, workers: dict[int, Worker]) -> None:
        schedule = program.schedule
        for rank, action in replay(schedule):
            sent = workers[rank].act(action)
            target = workers[rank].target(action)
            if target is not None:
                workers[schedule.rank_of_stage[target]].receive(action, target, sent)
        for level, exchanges in enumerate(program.epilogue.exchanges):
            for worker in workers.values():
                worker.end(level)
            for node, source, target in exchanges:
                workers[target].late[node] = workers[source].late_value(node)

    def _as_one_rank(self, program: PipelineProgram, worker: Worker) -> None:
        steps = program.cache.setdefault("messages", messages(program.schedule))[worker.rank]
        mail = Mail(self.carrier, self.axis, worker.rank, self.base.device)
        for step in steps:
            if isinstance(step, Send):
                mail.send(step, worker.outgoing.pop(step.action))
            elif isinstance(step, Receive):
                nodes = worker.message(step.action)
                mail.expect(step, [node.meta["val"] for node in nodes])
                worker.expected[step.action] = step
            else:
                self._act(program, worker, mail, step)
        mail.finish()
        for level, exchanges in enumerate(program.epilogue.exchanges):
            worker.end(level)
            self._exchange(worker, mail, exchanges)

    def _act(self, program: PipelineProgram, worker: Worker, mail: Mail, action: Action) -> None:
        for awaited in worker.awaited(action):
            step = worker.expected.pop(awaited, None)
            if step is not None:
                worker.receive(awaited, action.stage, mail.take(step))
        sent = worker.act(action)
        target = worker.target(action)
        if target is None:
            return
        if program.schedule.rank_of_stage[target] == worker.rank:
            worker.receive(action, target, sent)
        else:
            worker.outgoing[action] = sent

    def _exchange(self, worker: Worker, mail: Mail, exchanges: Sequence[Exchange]) -> None:
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[fx.Node]] = {}
        for node, source, target in exchanges:
            if source == worker.rank:
                outgoing.setdefault(target, []).append(worker.late_value(node))
            elif target == worker.rank:
                incoming.setdefault(source, []).append(node)
        avals = {source: [node.meta["val"] for node in nodes] for source, nodes in incoming.items()}
        for source, values in mail.exchange(outgoing, avals).items():
            worker.late.update(zip(incoming[source], values, strict=True))

    def _results(self, program: PipelineProgram, workers: dict[int, Worker]) -> list[Placed]:
        found = []
        for node, holders in zip(program.epilogue.outputs, program.epilogue.output_holders, strict=True):
            parts = {rank: worker.late_value(node) for rank, worker in workers.items() if rank in holders}
            found.append(Placed(parts, holders, node.meta["val"]))
        return found
