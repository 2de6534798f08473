"""Messages between ranks that do not wait for each other, and the rules that both servers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import optree

from ..functions import PyTree

__all__ = ["TO_CLIENT", "Message", "Node", "Rules"]

TO_CLIENT = ("reply", "final")  # kinds that a rank's training loop takes; its node takes the others


@dataclass(frozen=True, eq=False)  # trees of tensors have no equality
class Message:
    """Message from one rank to another, or to itself.

    Attributes:
        kind: "push" has a gradient and "reply" the weights of the next step. "left" and "gone" are about a rank that
            ended, as planned or not, and "final" has the weights at the end. "gradient", "turn" and "want" are those of
            the rotating server.
        source, target: global ranks.
        tree: gradients, or parameters, or parameters and optimizer state.
        numbers: what else it says.
    """

    kind: str
    source: int
    target: int
    tree: PyTree = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


class Node(Protocol):
    """What a rank holds for the others, as a value: a message makes a new node, and messages to send."""

    def handle(self, message: Message) -> tuple[Node, list[Message]]:
        """Return the node after a message, and its own messages, in order."""
        ...

    @property
    def weights(self) -> tuple[int, PyTree]:
        """Version and parameters."""
        ...

    @property
    def ended(self) -> Mapping[int, str]:
        """The ranks that died or left, with that word."""
        ...


@dataclass(frozen=True)
class Rules:
    """What is fixed for a run.

    Attributes:
        ranks: the number of ranks.
        staleness: the largest number of updates between the weights of a gradient and the update that uses it.
        update: (gradients, state, params) → (params, state).
        adds: whether gradients are added, as those of a loss that is a sum; else their mean is weighted by samples.
    """

    ranks: int
    staleness: int
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    adds: bool

    def combined(self, pushes: Sequence[Message]) -> PyTree:
        """Return the gradient of several ranks' samples together, added in rank order."""
        ordered = sorted(pushes, key=lambda push: push.source)
        trees, weights = [each.tree for each in ordered], [each.numbers["weight"] for each in ordered]
        if len(trees) == 1:
            return trees[0]
        if self.adds:
            return optree.tree_map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)
        first, *rest = weights

        def mean(leaf: Any, *leaves: Any) -> Any:
            total = leaf * first
            for weight, each in zip(rest, leaves, strict=True):
                total = total + each * weight
            return total / sum(weights)

        return optree.tree_map(mean, *trees)
