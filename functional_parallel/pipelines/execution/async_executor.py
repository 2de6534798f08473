"""One rank of an asynchronous pipeline: its weights change while microbatches are under way, so they have versions.

The microbatches that one update sums are like a synchronous step of their own, whose actions interleave with those of
others: each has a worker, with the version of the weights that its forward read. An update begins with the newest
version and makes the next; a version is dropped when nothing will read it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ...ir import info
from ...schedules import Action
from ..structure import PipelineStructure
from .rank_executor import RankExecutor, RunProgram

__all__ = ["AsyncRankExecutor"]


class AsyncRankExecutor:
    """Runs a rank's actions; takes a `RankExecutor`'s place.

    Args:
        program: the pipeline.
        rank: the rank of its axis.
        run: runs a single program on a list of inputs, which is given up.
        inputs: the step's inputs that this rank holds, the batch whole.
        slices: a part of the batch → the inputs that hold it.

    Attributes:
        versions: the weights and optimizer state that are kept, by version.
        most_versions: how many were kept at once at most.
        results: per update, the step's results on this rank; of what replaces inputs, those of the last one.
    """

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
        self.versions: dict[int, dict[fx.Node, Any]] = {0: inputs}
        self.newest, self.most_versions = 0, 1
        self.workers: dict[int, RankExecutor] = {}
        self.results: list[dict[fx.Node, Any]] = []
        self._mail: dict[int, list[tuple[Action, int, list[Any]]]] = {}
        self._to_read = [self.reads[action] for action in program.schedule.actions[rank] if action in self.reads]

    def begin(self) -> None:
        """Nothing: every update's microbatches begin by themselves."""

    def act(self, action: Action) -> list[Any]:
        """Run an action, and the update after it if the schedule has one there."""
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
        """Take what an action of a neighbouring stage made."""
        group, own = self._group(action)
        if group in self.workers:
            self.workers[group].receive(own, stage, values)
        else:  # the version that it will read may not be there yet
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
            self.results[-1].pop(node, None)  # an old version, which nobody wants as a result
        self.newest += 1
        self.versions[self.newest] = {**newest, **new}
        self.versions[self.newest - 1] = _weights(newest)  # only the newest optimizer state is ever read
        self.results.append(made)
        del self.workers[group]


def _weights(inputs: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """What microbatches may read of a step's inputs: no optimizer state."""
    return {node: x for node, x in inputs.items() if info(node).is_parameter or not info(node).is_state}
