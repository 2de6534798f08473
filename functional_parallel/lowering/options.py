"""Options of lowering and running a function, built from the arguments of `compile` or `train_step`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArgumentPaths", "Options"]


@dataclass(frozen=True)
class Options:
    """Options of the user that do not change the meaning of the program."""

    bucket: int | str | None = None  # bytes per collective; "auto" selects a size; None does not combine collectives
    without: frozenset[str] = frozenset()  # names of the passes that are disabled
    backend: str = "eager"  # executor of the ops between collectives: "eager" or "inductor"
    donate: bool = False  # whether the program may write into the memory of the state
    reduction: str = "fast"  # "fast" for sums in any order, "ordered" for sums in rank order


@dataclass(frozen=True)
class ArgumentPaths:
    """Pytree paths of the arguments of a function that are parameters and state."""

    parameters: str = "0"
    state: str | None = None  # the argument that a result replaces: parameters and optimizer state
