"""One rank of an asynchronous pipeline. Its weights change while microbatches are in flight, so they have versions.

The microbatches of one update form a synchronous step, with a worker that has the version that its forward read.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import fx

from ...ir import info
from ...schedules import Action
from ..structure import PipelineStructure
from .rank_executor import RankExecutor, RunProgram


class AsyncRankExecutor:
    def __init__(
        self,
        program: PipelineStructure,
        rank: int,
        run: RunProgram,
        inputs: dict[fx.Node, Any],
        slices: list[dict[fx.Node, Any]],
    ) -> None:
        assert program.schedule.versions is not None
        self.program, self.rank, self.run, self.slices = program, rank, run, slices
        self.reads, self.writes = program.schedule.versions.reads, program.schedule.versions.writes
        self.together = program.schedule.microbatches // len(slices)
        self.versions: dict[int, dict[fx.Node, Any]] = {0: inputs}  # the stored weights and optimizer state
        self.newest, self.most_versions = 0, 1
        self.workers: dict[int, RankExecutor] = {}
        self.results: list[dict[fx.Node, Any]] = []
        self._mail: dict[int, list[tuple[Action, int, list[Any]]]] = {}
        self._to_read = [self.reads[action] for action in program.schedule.actions[rank] if action in self.reads]

    def begin(self) -> None:
        """Do nothing, because the worker of each update starts separately."""

    def act(self, action: Action) -> list[Any]:
        self.most_versions = max(self.most_versions, len(self.versions))
        group, own = self._group(action)
        worker = self._worker(group, action)
        sent = worker.act(own)
        if action in self.writes:
            self._update(group, worker)
        self._to_read.pop(0)
        self.versions = {v: kept for v, kept in self.versions.items() if v in self._to_read or v == self.newest}
        return sent

    def receive(self, action: Action, stage: int, values: list[Any]) -> None:
        group, own = self._group(action)
        if group in self.workers:
            self.workers[group].receive(own, stage, values)
        else:  # the version that it will read may not exist yet
            self._mail.setdefault(group, []).append((own, stage, values))

    def _group(self, action: Action) -> tuple[int, Action]:
        group, microbatch = divmod(action.microbatch, self.together)
        return group, action._replace(microbatch=microbatch)

    def _worker(self, group: int, action: Action) -> RankExecutor:
        if group not in self.workers:
            inputs = {**_weights(self.versions[self.reads[action]]), **self.slices[group]}
            worker = self.workers[group] = RankExecutor(self.program, self.rank, self.run, inputs, ordered=True)
            worker.begin()
            for mail in self._mail.pop(group, ()):
                worker.receive(*mail)
        return self.workers[group]

    def _update(self, group: int, worker: RankExecutor) -> None:
        newest = self.versions[self.newest]
        worker.inputs = {**newest, **self.slices[group]}
        worker.end(0)
        epilogue = self.program.epilogue
        made = {
            node: worker.late_value(node)
            for node, holders in zip(epilogue.outputs, epilogue.output_holders, strict=True)
            if self.rank in holders
        }
        new = {place: made[node] for node, place in epilogue.replaces.items() if node in made}
        for node in epilogue.replaces if self.results else ():
            self.results[-1].pop(node, None)  # an old version is not a result
        self.newest += 1
        self.versions[self.newest] = {**newest, **new}
        self.versions[self.newest - 1] = _weights(newest)  # only the newest optimizer state is ever read
        self.results.append(made)
        del self.workers[group]


Executor: TypeAlias = RankExecutor | AsyncRankExecutor


def _weights(inputs: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    return {node: x for node, x in inputs.items() if info(node).is_parameter or not info(node).is_state}
