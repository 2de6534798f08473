"""Execution of a pipelined step in one process: the actions of its rank and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from ...ir import Aval, info
from ...schedules import Action, Receive, Send, messages
from ..epilogue import Transfer
from ..structure import PipelineStructure
from .async_executor import Executor
from .rank_executor import RankExecutor


class Mailbox(Protocol):
    def send(self, step: Send, values: list[Any]) -> None:
        """Send the values that an action made."""

    def expect(self, step: Receive, avals: Sequence[Aval]) -> None:
        """Start to receive a message with values of these shapes and dtypes."""

    def take(self, action: Action) -> list[Any] | None:
        """Wait for the values that an action on another rank made; None if no message carries them."""

    def finish(self) -> None:
        """Wait until everything that was sent has left."""

    def exchange(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[Any]]:
        """Send values to other ranks and receive values from other ranks."""


class ScheduleRunner:
    def __init__(self, program: PipelineStructure, mail: Mailbox, act: Callable[[Executor, Action], list[Any]]) -> None:
        self.program, self.mail, self.act = program, mail, act

    def run_schedule(self, worker: Executor) -> None:
        program = self.program
        if "messages" not in program.cache:
            program.cache["messages"] = messages(program.schedule)
        sent: list[Any] = []
        for step in program.cache["messages"][worker.rank]:
            if isinstance(step, Send):  # the result of the action right before it
                self.mail.send(step, sent)
                sent = []
            elif isinstance(step, Receive):
                self.mail.expect(step, [info(node).aval for node in program.message(step.action)])
            else:
                sent = self._run_action(worker, step)
        self.mail.finish()

    def _run_action(self, worker: Executor, action: Action) -> list[Any]:
        program = self.program
        for awaited in program.awaited(action):
            self._take(worker, awaited, action.stage)
        sent = self.act(worker, action)
        target = program.neighbour(action)
        if target is None or program.schedule.rank_of_stage[target] != worker.rank:
            return sent
        worker.receive(action, target, sent)
        return []

    def _take(self, worker: Executor, awaited: Action, stage: int) -> None:
        values = self.mail.take(awaited)  # referenced here only, since they may be freed within the action
        if values is not None:
            worker.receive(awaited, stage, values)

    def run_epilogue(self, worker: RankExecutor) -> None:
        for level, exchanges in enumerate(self.program.epilogue.exchanges):
            worker.end(level)
            self._exchange(worker, exchanges)

    def _exchange(self, worker: RankExecutor, exchanges: Sequence[Transfer]) -> None:
        outgoing: dict[int, list[Any]] = {}
        incoming: dict[int, list[fx.Node]] = {}
        for node, source, target in exchanges:
            if source == worker.rank:
                outgoing.setdefault(target, []).append(worker.late_value(node))
            elif target == worker.rank:
                incoming.setdefault(source, []).append(node)
        avals = {source: [info(node).aval for node in nodes] for source, nodes in incoming.items()}
        for source, values in self.mail.exchange(outgoing, avals).items():
            worker.late.update(zip(incoming[source], values, strict=True))


def slices_of(
    program: PipelineStructure, inputs: dict[fx.Node, Any], chunks: Callable[[Any, int, int], list[Any]]
) -> list[dict[fx.Node, Any]]:
    found: list[dict[fx.Node, Any]] = [{} for _ in range(program.updates)]
    for node, dim in program.cut_dims.items():
        for part, chunk in zip(found, chunks(inputs[node], program.updates, dim), strict=False):
            part[node] = chunk
    return found
