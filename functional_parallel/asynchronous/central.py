"""The parameter server: one rank holds the weights, and updates them by the gradients that ranks push.

An update waits while a rank is at work on weights older than the bound, so no gradient is ever older. It takes all
pushes that arrived meanwhile together; with a bound of 0, one of each rank: synchronous training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .protocol import Message, Node


@dataclass(frozen=True)
class Central(Node):
    working: Mapping[int, int]  # version of the weights of each rank that is at work
    pending: tuple[Message, ...] = ()  # pushes that wait for an update

    def handle(self, message: Message) -> tuple[Central, list[Message]]:
        rank = message.source
        node = replace(self, working={each: at for each, at in self.working.items() if each != rank})
        if message.kind == "push":
            node = replace(node, pending=(*self.pending, message))
        elif rank not in self.ended:
            node = replace(node, ended={**self.ended, rank: "died" if message.kind == "gone" else "left"})
        return node._updated()

    def _updated(self) -> tuple[Central, list[Message]]:
        waits = any(self.version + 1 - at > self.rules.staleness for at in self.working.values())
        if not self.pending:
            return self, [] if self.working else self._final()
        if waits:
            return self, []
        gradients = self.rules.combined(self.pending)
        params, optimizer = self.rules.update(gradients, self.optimizer, self.params)
        version = self.version + 1
        pushes = sorted((each for each in self.pending if each.source not in self.ended), key=lambda each: each.source)
        working = {**self.working, **{each.source: version for each in pushes}}
        node = replace(self, params=params, optimizer=optimizer, version=version, working=working, pending=())
        replies = [node.reply(each.source, self.version - each.numbers["version"]) for each in pushes]
        return node, replies if node.working else node._final()

    def _final(self) -> list[Message]:
        numbers = {"version": self.version, "ended": list(self.ended.items())}
        ranks = [rank for rank, how in sorted(self.ended.items()) if how == "left"]
        return [Message("final", self.rank, rank, self.params, numbers) for rank in ranks]
