"""Messages between ranks that do not wait for each other, and the rules that both servers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree

from ..functions import PyTree

TO_CLIENT = ("reply", "final")  # kinds that a rank's training loop takes; its node takes the others


@dataclass(frozen=True, eq=False)  # trees of tensors have no equality
class Message:
    """Message from one rank to another, or to itself.

    "push" has a gradient and "reply" the weights of the next step. "left" and "gone" are about a rank that ended, as
    planned or not, and "final" has the weights at the end. "gradient", "turn" and "want" are those of the rotating
    server.
    """

    kind: str
    source: int
    target: int
    tree: PyTree = None  # gradients, or parameters, or parameters and optimizer state
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    ranks: int
    staleness: int  # the largest number of updates between the weights of a gradient and the update that uses it
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]  # (gradients, state, params) → (params, state)
    adds: bool  # whether gradients are added, for a loss that is a sum; else their mean is weighted by samples

    def combined(self, pushes: Sequence[Message]) -> PyTree:
        ordered = sorted(pushes, key=lambda push: push.source)
        trees, weights = [each.tree for each in ordered], [each.numbers["weight"] for each in ordered]
        if len(trees) == 1:
            return trees[0]

        def mean(*leaves: Any) -> Any:
            first, *rest = (leaf * weight for leaf, weight in zip(leaves, weights, strict=True))
            return sum(rest, first) / sum(weights)

        return optree.tree_map((lambda first, *rest: sum(rest, first)) if self.adds else mean, *trees)


@dataclass(frozen=True)
class Node(ABC):
    """A rank's value for the others, as a value: a message makes a new node, and messages to send."""

    rules: Rules
    rank: int
    params: PyTree
    optimizer: PyTree
    version: int = field(default=0, kw_only=True)  # number of the updates, or of the turns, that made the weights
    ended: Mapping[int, str] = field(default_factory=dict, kw_only=True)  # ranks that died or left, with that word

    @abstractmethod
    def handle(self, message: Message) -> tuple[Node, list[Message]]:
        """Return the node after a message, and its own messages, in order."""

    @property
    def weights(self) -> tuple[int, PyTree]:
        return self.version, self.params

    def reply(self, target: int, staleness: int | None, dropped: int = 0) -> Message:
        numbers = {
            "version": self.version,
            "staleness": staleness,
            "ended": list(self.ended.items()),
            "dropped": dropped,
        }
        return Message("reply", self.rank, target, self.params, numbers)
