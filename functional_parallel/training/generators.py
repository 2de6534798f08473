"""Deferred random draws that return the same numbers as immediate draws.

A recorded draw does not advance its generator. Instead the generator is seeded with a mark, the number of the draw. A
later draw therefore begins with the state after an earlier one, also after `torch.random.fork_rng`, or with a state
that the function has set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_MARK = 0x6A09E667F3BCC908  # plus the number of the draw; unlikely as a user's seed


class Generators:
    """Generators of a recording, and their states in its replay."""

    def __init__(self) -> None:
        self._before: dict[torch.Generator, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}  # by number of the draw, in the replay
        self._count = 0

    def deferred(self, generator: torch.Generator, draw: Callable[P, R]) -> Callable[P, R]:
        """Return a function that later draws the numbers that `draw` would draw now."""
        begins, number = self._state(generator), self._count
        self._before.setdefault(generator, generator.get_state())
        generator.manual_seed(_MARK + number)
        self._count += 1

        def later(*args: P.args, **kwargs: P.kwargs) -> R:
            self._set(generator, begins)
            result = draw(*args, **kwargs)
            self._after[number] = generator.get_state()
            return result

        return later

    def ends(self) -> list[Callable[[], None]]:
        """Return functions that set the states of the generators to their states after the recorded function."""
        return [partial(self._set, generator, self._state(generator)) for generator in self._before]

    def forget(self) -> None:
        """Restore the states that the generators had before the recording."""
        for generator, state in self._before.items():
            generator.set_state(state)

    def _state(self, generator: torch.Generator) -> torch.Tensor | int:
        """Return a state that the function has set, or the number of the draw that results in it."""
        number = generator.initial_seed() - _MARK
        return number if 0 <= number < self._count else generator.get_state()

    def _set(self, generator: torch.Generator, state: torch.Tensor | int) -> None:
        generator.set_state(self._after[state] if isinstance(state, int) else state)
