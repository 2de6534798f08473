"""How a function is lowered and run: one value, made from the arguments of `compile` or `train_step`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArgumentPaths", "Options"]


@dataclass(frozen=True)
class Options:
    """Choices of the user that do not change what is computed.

    Attributes:
        bucket: bytes that travel in one collective; "auto" to fit the program; None for one collective each.
        without: the names of passes that are switched off.
        backend: what computes between collectives: "eager" or "inductor".
        donate: whether the program may write into the memory of the state.
        reduction: "fast" for the backend's own sums, "ordered" for sums in rank order.
    """

    bucket: int | str | None = None
    without: frozenset[str] = frozenset()
    backend: str = "eager"
    donate: bool = False
    reduction: str = "fast"


@dataclass(frozen=True)
class ArgumentPaths:
    """Which arguments of a function are parameters, and which are state.

    Attributes:
        parameters: the pytree path of the argument that holds the model's parameters.
        state: the path of the argument whose new value is a result: parameters and optimizer state; None for none.
    """

    parameters: str = "0"
    state: str | None = None
