"""Options of lowering and running a function, built from the arguments of `compile` or `train_step`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArgumentPaths", "Options"]


@dataclass(frozen=True)
class Options:
    """Options of the user that do not change the meaning of the program.

    Attributes:
        bucket: bytes per collective; "auto" selects a size for the program; None does not combine collectives.
        without: names of the passes that are disabled.
        backend: executor of the ops between collectives: "eager" or "inductor".
        donate: whether the program may write into the memory of the state.
        reduction: "fast" for sums in any order, "ordered" for sums in rank order.
    """

    bucket: int | str | None = None
    without: frozenset[str] = frozenset()
    backend: str = "eager"
    donate: bool = False
    reduction: str = "fast"


@dataclass(frozen=True)
class ArgumentPaths:
    """Paths of the arguments of a function that are parameters and state.

    Attributes:
        parameters: the pytree path of the argument that holds the model's parameters.
        state: the path of the argument that a result replaces (parameters and optimizer state), or None.
    """

    parameters: str = "0"
    state: str | None = None
