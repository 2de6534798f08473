"""Deferred random draws that return the same numbers as immediate draws.

A recorded draw does not advance its generator. Instead the generator is seeded with a mark that identifies the draw. If
its state at the next draw is not that mark, the function has set the state. The new state may be the state after an
earlier draw, as with `torch.random.fork_rng`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GeneratorReplay", "Generators", "RecordedDraw", "draws"]

_MARK = 0x6A09E667F3BCC908  # plus the number of the draw; unlikely as a user's seed


def draws(op: Any) -> bool:
    """Whether an op draws from a torch generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


@dataclass(frozen=True)
class RecordedDraw:
    """Recorded draw.

    Attributes:
        generator: generator of the draw.
        begins: state that the generator was set to since its previous draw. If it is the state after an earlier draw,
            the number of that draw. None if the generator was not set.
    """

    generator: torch.Generator
    begins: torch.Tensor | int | None


class Generators:
    """Generators of a recording, with the changes of their states between draws."""

    def __init__(self) -> None:
        self._begun: dict[torch.Generator, torch.Tensor] = {}
        self._marks: dict[torch.Generator, dict[bytes, int]] = {}
        self._last: dict[torch.Generator, bytes] = {}

    def noted(self, generator: torch.Generator, number: int) -> RecordedDraw:
        """Record a draw under a unique number."""
        draw = RecordedDraw(generator, self._since_last(generator))
        generator.manual_seed(_MARK + number)
        key = self._last[generator] = _key(generator.get_state())
        self._marks.setdefault(generator, {})[key] = number
        return draw

    def _since_last(self, generator: torch.Generator) -> torch.Tensor | int | None:
        state = generator.get_state()
        self._begun.setdefault(generator, state)
        key = _key(state)
        return None if key == self._last.get(generator) else self._marks.get(generator, {}).get(key, state)

    def forget(self) -> None:
        """Restore the states that the generators had before the recording."""
        for generator, state in self._begun.items():
            generator.set_state(state)

    def replay(self, noted: Iterable[RecordedDraw | None]) -> GeneratorReplay:
        """Return an object that sets the generators before each recorded draw during the replay."""
        last = [RecordedDraw(generator, self._since_last(generator)) for generator in self._begun]
        begins = (draw.begins for draw in (*noted, *last) if draw is not None)
        return GeneratorReplay(last, {begin for begin in begins if isinstance(begin, int)})


class GeneratorReplay:
    """Sets the states of generators in a replay in the same way as in the recording.

    Args:
        last: per generator, the state that it was set to after its last draw.
        returned_to: numbers of the draws with a result state that is needed later.
    """

    def __init__(self, last: list[RecordedDraw], returned_to: set[int]) -> None:
        self._last, self._returned_to = last, returned_to
        self._after: dict[int, torch.Tensor] = {}

    @contextmanager
    def __call__(self, number: int, draw: RecordedDraw | None) -> Iterator[None]:
        """Context of op `number`. If it is a draw, set its generator before it, and save a state needed later."""
        if draw is not None:
            self._set(draw)
        yield
        if draw is not None and number in self._returned_to:
            self._after[number] = draw.generator.get_state()

    def end(self) -> None:
        """Set the states that the function set after its last draws."""
        for draw in self._last:
            self._set(draw)

    def _set(self, draw: RecordedDraw) -> None:
        if draw.begins is not None:
            draw.generator.set_state(self._after[draw.begins] if isinstance(draw.begins, int) else draw.begins)


def _key(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
