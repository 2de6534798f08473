"""Base class of passes, and functions that run several passes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable
from enum import IntEnum
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced

T = TypeVar("T")


class Phase(IntEnum):
    """Phase in which a pass runs, in ascending order. Passes of one phase run in the order of `passes.table`."""

    PREPARE = -2  # sums over ranks and microbatches get their order
    TYPES = -1  # casts and sums get their types; the last phase before microbatches are unrolled or stages are cut
    RECOMPUTE = 0  # values are not saved but recomputed in the backward
    GATHERS = 1  # gathers of parameters get their positions
    SUMS = 2  # sums of gradients get their positions, and cheap values are recomputed
    BUCKETS = 3  # collectives are merged
    IN_PLACE = 4  # updates are written in place


class ProgramPass(ABC):
    """A rewrite of a program's graph, in place."""

    name: ClassVar[str]  # in `program.passes` and in `without=`
    phase: ClassVar[Phase]

    def per_microbatch(self, traced: Traced) -> Collection[fx.Node]:
        """Values that do not depend on the microbatch, but are recomputed for each microbatch."""
        return ()

    @abstractmethod
    def run(self, traced: Traced, mesh: Mesh) -> None: ...


@runtime_checkable
class LookaheadPass(Protocol):
    """A pass that depends on the effect of the later passes."""

    def run_before(self, traced: Traced, mesh: Mesh, rest: Callable[[Traced], None]) -> str | None:
        """Rewrite the graph in place; `rest` runs the later passes on a graph. Return a note for `explain`."""
        ...


def pass_names(without: str | Collection[str]) -> frozenset[str]:
    """Return a set of pass names; a single name may be given as a string.

    >>> pass_names("buckets") == pass_names(["buckets"])
    True
    """
    return frozenset([without] if isinstance(without, str) else without)


def finished(steps: Generator[object, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def run_passes(
    passes: Iterable[ProgramPass], traced: Traced, mesh: Mesh, without: Collection[str]
) -> Generator[str, None, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Run passes in order, except those in `without`; yield each name after it ran. Return names and notes."""
    chosen = {each: None for each in passes if each.name not in without}
    ordered = list(chosen)
    notes = []
    for index, each in enumerate(ordered):
        if isinstance(each, LookaheadPass):
            notes.append(each.run_before(traced, mesh, functools.partial(_run, ordered[index + 1 :], mesh)))
        else:
            each.run(traced, mesh)
        traced.seal()
        yield each.name
    return tuple(each.name for each in ordered), tuple(note for note in notes if note)


def _run(passes: Iterable[ProgramPass], mesh: Mesh, traced: Traced) -> None:
    for each in passes:
        each.run(traced, mesh)
        traced.seal()
