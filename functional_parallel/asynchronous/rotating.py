"""The rotating server: every rank has weights of its own, and in turn each collects the others' gradients.

The rank whose turn it is (the holder) updates its weights by its own gradient and those that arrived; the others go on
with theirs. Then the turn moves to the next rank. So a rank's weights are as old as the turns of the other ranks, and
no rank waits for another. With a bound of 0 the holder waits for a gradient of every rank and sends its weights to all:
synchronous training, where the work of the server goes round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..functions import PyTree
from .messages import Message, Rules

__all__ = ["Rotating"]


@dataclass(frozen=True)
class Rotating:
    """Node of one rank.

    Attributes:
        rules: what is fixed for the run.
        rank: this rank.
        params, optimizer: its weights and their optimizer state.
        alive: ranks that take part.
        version: the turn after which the weights were updated.
        turn, holder: number of the turn, and the rank whose turn it is, as far as this rank knows.
        inbox: gradients of others, for a turn of this rank.
        own: the last gradient of this rank, while its training loop waits.
        left: weights of ranks that have finished, with their versions.
        ended: ranks that died or left, with that word.
    """

    rules: Rules
    rank: int
    params: PyTree
    optimizer: PyTree
    alive: frozenset[int]
    version: int = 0
    turn: int = 0
    holder: int = 0
    inbox: tuple[Message, ...] = ()
    own: Message | None = None
    left: Mapping[int, tuple[int, PyTree]] = field(default_factory=dict)
    ended: Mapping[int, str] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[int, PyTree]:
        return self.version, self.params

    def handle(self, message: Message) -> tuple[Rotating, list[Message]]:
        kinds = {
            "push": self._pushed,
            "gradient": self._given,
            "turn": self._told,
            "want": self._asked,
            "left": self._ended,
            "gone": self._ended,
        }
        return kinds[message.kind](message)

    # --- gradients ---

    def _pushed(self, push: Message) -> tuple[Rotating, list[Message]]:
        """Take the gradient of this rank's own training loop."""
        node = replace(self, own=push)
        if self.holder == self.rank:
            return node._turned()
        sent = [self._gradient(push)]
        if self.rules.staleness == 0:
            return node, sent
        return self, [*sent, self._reply()]

    def _given(self, gradient: Message) -> tuple[Rotating, list[Message]]:
        """Take the gradient of another rank. A sender may know of a later turn, or not yet of this one."""
        if self.holder == self.rank or gradient.numbers["turn"] > self.turn:
            return replace(self, inbox=(*self.inbox, gradient))._turned()
        return self, [self._gradient(gradient)]

    def _gradient(self, push: Message) -> Message:
        numbers = {"version": self.version, **push.numbers, "turn": self.turn}
        return Message("gradient", push.source, self.holder, push.tree, numbers)

    # --- turns ---

    def _turned(self) -> tuple[Rotating, list[Message]]:
        """Take this rank's turn, if it is due."""
        if self.own is None or self.holder != self.rank:
            return self, []
        sent = list[Message]()
        inbox = self.inbox
        if self.rules.staleness == 0:
            inbox = tuple(each for each in inbox if each.numbers["version"] == self.version)
            for each in self.inbox:
                if each.numbers["version"] < self.version:
                    sent.append(self._turn(each.source))
                elif each.numbers["version"] > self.version:
                    sent.append(Message("want", self.rank, each.source))
            if self.alive - {self.rank} - {each.source for each in inbox}:
                return replace(self, inbox=inbox), sent
        ages = [(self.turn - each.numbers["version"], each) for each in (self.own, *inbox)]
        used = [(age, each) for age, each in ages if age <= self.rules.staleness]
        params, optimizer = self.params, self.optimizer
        if used:
            params, optimizer = self.rules.update(self.rules.combined([push for _, push in used]), optimizer, params)
        after = self.turn + 1
        node = replace(
            self,
            params=params,
            optimizer=optimizer,
            version=after,
            turn=after,
            holder=self._next(self.rank),
            inbox=(),
            own=None,
        )
        others = sorted(self.alive - {self.rank}, key=lambda rank: (rank != node.holder, rank))
        sent += [node._turn(rank) for rank in others]
        return node, [*sent, node._reply(max((age for age, _ in used), default=None), len(ages) - len(used))]

    def _next(self, rank: int) -> int:
        order = [(rank + step) % self.rules.ranks for step in range(1, self.rules.ranks)]
        return next((each for each in order if each in self.alive), self.rank)

    def _turn(self, target: int) -> Message:
        numbers = {"turn": self.turn, "holder": self.holder, "version": self.version}
        weights = (self.params, self.optimizer) if self.rules.staleness == 0 else None
        return Message("turn", self.rank, target, weights, numbers)

    def _reply(self, staleness: int | None = None, dropped: int = 0) -> Message:
        numbers = {"version": self.version, "staleness": staleness, "ended": self.ended, "dropped": dropped}
        return Message("reply", self.rank, self.rank, self.params, numbers)

    def _told(self, message: Message) -> tuple[Rotating, list[Message]]:
        """Learn whose turn it is."""
        numbers, node = message.numbers, self
        if numbers["turn"] >= self.turn:
            node = replace(node, turn=numbers["turn"], holder=numbers["holder"])
        if node.holder not in node.alive | {node.rank}:
            node = replace(node, holder=node._next(node.holder))
        sent = list[Message]()
        if message.tree is not None and numbers["version"] > self.version:
            params, optimizer = message.tree
            node = replace(node, params=params, optimizer=optimizer, version=numbers["version"], own=None)
            sent += [node._reply(0)] * (self.own is not None)
        return node._forwarded(sent)

    def _forwarded(self, sent: list[Message]) -> tuple[Rotating, list[Message]]:
        """Pass on gradients that came for a turn that another rank has, and take this rank's turn if it is due."""
        if self.holder == self.rank:
            node, more = self._turned()
            return node, [*sent, *more]
        early = tuple(each for each in self.inbox if each.numbers["turn"] > self.turn)
        late = [self._gradient(each) for each in self.inbox if each not in early]
        return replace(self, inbox=early), [*sent, *late]

    def _asked(self, message: Message) -> tuple[Rotating, list[Message]]:
        return self, [self._turn(message.source)]

    # --- the end of a rank ---

    def _ended(self, message: Message) -> tuple[Rotating, list[Message]]:
        rank = message.source
        if rank == self.rank:
            return self._finished()
        if rank in self.ended:
            return self, []
        died = message.kind == "gone"
        node = replace(self, alive=self.alive - {rank}, ended={**self.ended, rank: "died" if died else "left"})
        if not died:
            node = replace(node, left={**self.left, rank: (message.numbers["version"], message.tree)})
        sent = list[Message]()
        if self.holder == rank and self.rank in self.alive:
            node = replace(node, holder=node._next(rank), turn=self.turn + 1)
            if node.own is not None and node.holder != node.rank:
                sent.append(node._gradient(node.own))
        node, more = node._forwarded(sent)
        return node, [*more, *node._final()]

    def _finished(self) -> tuple[Rotating, list[Message]]:
        numbers = {"version": self.version}
        others = [rank for rank in range(self.rules.ranks) if rank != self.rank and self.ended.get(rank) != "died"]
        node = replace(self, alive=self.alive - {self.rank}, left={**self.left, self.rank: self.weights})
        told = [Message("left", self.rank, rank, self.params, numbers) for rank in others]
        return node, [*told, *node._final()]

    def _final(self) -> list[Message]:
        if self.alive or self.rank not in self.left:
            return []
        _, best = min((-version, rank) for rank, (version, _) in self.left.items())
        version, params = self.left[best]
        return [Message("final", self.rank, self.rank, params, {"version": version, "ended": self.ended})]
