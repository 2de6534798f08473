"""Random numbers that are drawn later than they were asked for, and are what they would have been.

While draws are only noted, nothing moves a generator on. So it is marked at each: a state that is not the last mark was
set by somebody, to one of its own or, as `torch.random.fork_rng` does, to what it had after an earlier draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GeneratorReplay", "Generators", "RecordedDraw", "draws"]

_MARK = 0x6A09E667F3BCC908  # and the number of the draw; nobody's seed


def draws(op: Any) -> bool:
    """Whether an op draws from a generator of torch's."""
    return torch.Tag.nondeterministic_seeded in op.tags


@dataclass(frozen=True)
class RecordedDraw:
    """A draw that was noted.

    Attributes:
        generator: from which.
        begins: the state that this was set to since the draw before; of a state after an earlier draw, that draw's
            number; None where it goes on.
    """

    generator: torch.Generator
    begins: torch.Tensor | int | None


class Generators:
    """The generators that a recording draws from, and what is done to them between draws."""

    def __init__(self) -> None:
        self._begun: dict[torch.Generator, torch.Tensor] = {}
        self._marks: dict[torch.Generator, dict[bytes, int]] = {}
        self._last: dict[torch.Generator, bytes] = {}

    def noted(self, generator: torch.Generator, number: int) -> RecordedDraw:
        """Note a draw, by a number of its own."""
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
        """Put all back, as if nothing had been noted."""
        for generator, state in self._begun.items():
            generator.set_state(state)

    def replay(self, noted: Iterable[RecordedDraw | None]) -> GeneratorReplay:
        """Who sets generators around the draws that were noted."""
        last = [RecordedDraw(generator, self._since_last(generator)) for generator in self._begun]
        begins = (draw.begins for draw in (*noted, *last) if draw is not None)
        return GeneratorReplay(last, {begin for begin in begins if isinstance(begin, int)})


class GeneratorReplay:
    """Sets generators as they were set when draws were noted.

    Args:
        last: what was done to each after its last draw.
        returned_to: numbers of the draws after which the state is wanted once more.
    """

    def __init__(self, last: list[RecordedDraw], returned_to: set[int]) -> None:
        self._last, self._returned_to = last, returned_to
        self._after: dict[int, torch.Tensor] = {}

    @contextmanager
    def __call__(self, number: int, draw: RecordedDraw | None) -> Iterator[None]:
        """Around the draw of that number, if it is one."""
        if draw is not None:
            self._set(draw)
        yield
        if draw is not None and number in self._returned_to:
            self._after[number] = draw.generator.get_state()

    def end(self) -> None:
        """Set what was set after the last draw."""
        for draw in self._last:
            self._set(draw)

    def _set(self, draw: RecordedDraw) -> None:
        if draw.begins is not None:
            draw.generator.set_state(self._after[draw.begins] if isinstance(draw.begins, int) else draw.begins)


def _key(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
