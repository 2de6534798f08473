"""The rotating server: every rank has weights of its own, and in turn each collects the others' gradients.

The holder of the turn, a rank, updates its weights by its own gradient and the gradients that arrived. Then the turn
moves on, so no rank waits for another. With a bound of 0 it waits for all, and sends its weights to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..functions import PyTree
from .protocol import Message, Node


@dataclass(frozen=True)
class Rotating(Node):
    """Node of one rank. A turn's number says whose it is: rank `turn % ranks`; those of ended ranks are left out.

    The version of a rank's weights is 1 more than the number of the turn that updated them.
    """

    alive: frozenset[int]  # ranks that take part
    turn: int = 0  # the newest that this rank knows of
    inbox: tuple[Message, ...] = ()  # gradients of others, for a turn of this rank
    own: Message | None = None  # the last gradient of this rank, while its training loop waits
    sent: int = -1  # the turn to whose holder `own` was sent
    left: Mapping[int, tuple[int, PyTree]] = field(default_factory=dict)  # versioned weights of ranks that finished

    @property
    def holder(self) -> int:
        return self.turn % self.rules.ranks

    def handle(self, message: Message) -> tuple[Rotating, list[Message]]:
        kinds = {
            "push": self._pushed,
            "gradient": self._given,
            "turn": self._told,
            "want": lambda wanted: (self, [self._turn(wanted.source)]),
            "left": self._finished if message.source == self.rank else self._ended,
            "gone": self._ended,
        }
        node, sent = kinds[message.kind](message)
        node, more = node._settled()
        return node, [*sent, *more]

    def _settled(self) -> tuple[Rotating, list[Message]]:
        if self.rank not in self.alive:
            return replace(self, inbox=()), self._final()
        turns = range(self.turn, self.turn + self.rules.ranks)
        node = replace(self, turn=next(turn for turn in turns if turn % self.rules.ranks in self.alive))
        if node.holder == node.rank:
            return node._turned() if node.own is not None else (node, [])
        sent = [node._gradient(each) for each in node.inbox if each.numbers["turn"] <= node.turn]
        node = replace(node, inbox=tuple(each for each in node.inbox if each.numbers["turn"] > node.turn))
        if node.own is not None and node.sent != node.turn:
            sent.append(node._gradient(node.own))
            node = replace(node, sent=node.turn)
        return node, sent

    def _pushed(self, push: Message) -> tuple[Rotating, list[Message]]:
        if self.holder == self.rank or self.rules.staleness == 0:
            return replace(self, own=push, sent=-1), []
        return self, [self._gradient(push), self.reply(self.rank, None)]

    def _given(self, gradient: Message) -> tuple[Rotating, list[Message]]:
        ahead = self.rules.staleness == 0 and gradient.numbers["version"] > self.version
        wanted = [Message("want", self.rank, gradient.source)] if ahead else []
        return replace(self, inbox=(*self.inbox, gradient)), wanted

    def _gradient(self, push: Message) -> Message:
        return Message("gradient", push.source, self.holder, push.tree, {**push.numbers, "turn": self.turn})

    def _turned(self) -> tuple[Rotating, list[Message]]:
        """Take this rank's turn. Without staleness, first wait for a gradient of every rank by the same weights."""
        assert self.own is not None
        sent, inbox = list[Message](), self.inbox
        if self.rules.staleness == 0:
            behind = [each for each in inbox if each.numbers["version"] < self.version]
            sent += [self._turn(each.source) for each in behind if each.source in self.alive]
            by_rank = {each.source: each for each in inbox if each not in behind}
            inbox = tuple(by_rank.values())
            ready = {rank for rank, each in by_rank.items() if each.numbers["version"] == self.version}
            if self.alive - {self.rank} - ready:
                return replace(self, inbox=inbox), sent
            inbox = tuple(by_rank[rank] for rank in ready)
        ages = [
            (self.turn - each.numbers["version"] if self.rules.staleness else 0, each) for each in (self.own, *inbox)
        ]
        used = [(age, each) for age, each in ages if age <= self.rules.staleness]
        params, optimizer = self.params, self.optimizer
        if used:
            params, optimizer = self.rules.update(self.rules.combined([push for _, push in used]), optimizer, params)
        after = self.turn + 1
        node = replace(self, params=params, optimizer=optimizer, version=after, turn=after, inbox=(), own=None)
        reply = node.reply(self.rank, max((age for age, _ in used), default=None), len(ages) - len(used))
        node, more = node._settled()
        others = sorted(self.alive - {self.rank}, key=lambda rank: (rank != node.holder, rank))
        return node, [*sent, *(node._turn(rank) for rank in others), *more, reply]

    def _turn(self, target: int) -> Message:
        weights = (self.params, self.optimizer) if self.rules.staleness == 0 else None
        return Message("turn", self.rank, target, weights, {"turn": self.turn, "version": self.version})

    def _told(self, message: Message) -> tuple[Rotating, list[Message]]:
        node = replace(self, turn=max(self.turn, message.numbers["turn"]))
        if message.tree is None or message.numbers["version"] <= self.version:
            return node, []
        params, optimizer = message.tree
        node = replace(node, params=params, optimizer=optimizer, version=message.numbers["version"], own=None)
        return node, [] if self.own is None else [node.reply(self.rank, 0)]

    def _ended(self, message: Message) -> tuple[Rotating, list[Message]]:
        rank, left = message.source, dict(self.left)
        if rank in self.ended:
            return self, []
        if message.kind == "left":
            left[rank] = (message.numbers["version"], message.tree)
        ended = {**self.ended, rank: "left" if message.kind == "left" else "died"}
        return replace(self, alive=self.alive - {rank}, left=left, ended=ended), []

    def _finished(self, message: Message) -> tuple[Rotating, list[Message]]:
        others = [rank for rank in range(self.rules.ranks) if rank != self.rank and self.ended.get(rank) != "died"]
        told = [Message("left", self.rank, rank, self.params, {"version": self.version}) for rank in others]
        node = replace(self, alive=self.alive - {self.rank}, left={**self.left, self.rank: self.weights})
        return node, told

    def _final(self) -> list[Message]:
        if self.alive:
            return []
        _, best = min((-version, rank) for rank, (version, _) in self.left.items())
        version, params = self.left[best]
        return [Message("final", self.rank, self.rank, params, {"version": version, "ended": list(self.ended.items())})]
