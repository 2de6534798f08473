"""Base class of passes, and the programs that a pass rewrites."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar, NamedTuple, TypeAlias

from torch import Tensor, fx

from sharding_specs import Mesh

from ..collectives import DimSplit
from ..ir import Aval, Traced
from ..program import MemoryUse, Program, Watch
from .options import Options


class Phase(IntEnum):
    """Phase of a pass, in ascending order. Passes of one phase run in the order of `passes.table`."""

    PREPARE = 0  # the graph is simplified; sums over ranks and microbatches get their order
    TYPES = 1  # casts and sums get their types
    CUT = 2  # microbatches are unrolled, or the step is brought into the form that is cut into stages
    RECOMPUTE = 3  # values are not saved but recomputed in the backward
    RESIDUALS = 4  # values that are saved for the backward are stored in another form
    GATHERS = 5  # gathers of parameters get their positions
    SUMS = 6  # sums of gradients get their positions, and cheap values are recomputed
    BUCKETS = 7  # collectives are merged
    MOVES = 8  # values move between memories
    IN_PLACE = 9  # updates and sums are written in place, and views are fused
    WIRE = 10  # collectives get the format of their messages


class Scope(Enum):
    """Programs that a pass runs on. Without a pipeline there is one program, and every pass runs on it."""

    STEP = "step"  # the whole step; in a pipeline before it is cut
    STAGED = "staged step"  # the whole step, when each op has its stage
    STAGE = "stage"  # each program after the cut: of the stages, before them and after them
    PAIR = "pair"  # the programs of a stage's forward and backward together


@dataclass(frozen=True)
class Settings:
    """Facts about a step that its passes read: what a user and the transforms requested, and the virtual axes."""

    mesh: Mesh  # with the virtual axes
    splits: Mapping[str, DimSplit] = field(default_factory=dict)  # of the batch, by virtual axis
    pipelined: str | None = None  # the virtual axis of the microbatches that a pipeline runs
    requested: tuple[ProgramPass, ...] = ()
    options: Options = field(default_factory=Options)
    stage_axis: str | None = None  # the mesh axis with the stages of a pipeline on its ranks

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        """Return the values that do not depend on the microbatch, but are recomputed for each microbatch."""
        return {node for each in self.requested for node in each.per_microbatch(traced)}


class Completed(NamedTuple):
    """Result of a trial: the memory of the program, or of each rank of a pipeline and the values that it saves."""

    memories: tuple[MemoryUse, ...]
    saved: tuple[Collection[fx.Node], ...] = ()
    in_flight: tuple[int, ...] = ()  # number of microbatches whose values a rank saves at the same time
    sent: Collection[fx.Node] = ()  # values that a stage sends to the next stage


def _completed(program: Program) -> Completed:
    return Completed((program.memory(),))


@dataclass(frozen=True)
class StagedOps:
    of: Mapping[fx.Node, int]
    backward: Collection[fx.Node]
    is_held: Callable[[fx.Node], bool]  # whether a value is in memory for the entire step
    is_repeated: Callable[[fx.Node], bool]  # whether each program that needs a value computes it


class RunningSum(NamedTuple):
    """Sum over microbatches: the program with the first summand, and the programs that add to it, with the output."""

    first: tuple[Program, int]
    adding: tuple[tuple[Program, int], ...]


Chosen: TypeAlias = Callable[[Sequence[fx.Node], Mesh], Sequence[fx.Node]]
Pack: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
Unpack: TypeAlias = Callable[[Sequence[Tensor], Aval], Tensor]
Exchange: TypeAlias = Callable[[Chosen, Pack, Unpack], Sequence[fx.Node]]  # returns the values that are stored


@dataclass
class Unit:
    """Programs that a pass rewrites at once: one, or those of a pipeline stage, the forward first."""

    programs: Sequence[Program]
    settings: Settings
    staged: StagedOps | None = None
    exchange: Exchange | None = None  # stores residuals in another form; None if forward and backward are one program
    sums: Sequence[RunningSum] = ()
    rest: Callable[[Program], None] = lambda program: None  # runs the later passes of the step on a copy
    complete: Callable[[Program], Completed] = _completed  # cuts such a copy into a pipeline, if there is one

    @property
    def program(self) -> Program:
        return self.programs[0]


class ProgramPass(ABC):
    """A rewrite of a program, in place. A pass overrides `run`, or `rewrite` if it needs more than the graph."""

    name: ClassVar[str]  # in `program.passes` and in `without=`
    phase: ClassVar[Phase]
    scope: ClassVar[Scope] = Scope.STEP
    affects_memory: ClassVar[bool] = True  # if not, tentative runs leave it out
    is_implied: ClassVar[bool] = False  # whether it runs on every program
    is_required: ClassVar[bool] = False  # whether programs cannot run without it, so that `without=` refuses its name

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        """Passes of this class that run without a request."""
        return [cls()] if cls.is_implied else []

    def per_microbatch(self, traced: Traced) -> Collection[fx.Node]:
        """Values that do not depend on the microbatch, but are recomputed for each microbatch."""
        return ()

    def rewrite(self, unit: Unit) -> str | None:
        """Rewrite the programs of a unit in place. Return a note for `explain`."""
        for program in unit.programs:
            self.run(program.traced, program.mesh)
        return None

    def run(self, traced: Traced, mesh: Mesh) -> None:
        """Rewrite one graph in place."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither run nor rewrite")


def run_pass(each: ProgramPass, unit: Unit, watch: Watch | None = None) -> None:
    """Run a pass on a unit, and tell `watch` of each program that it rewrote."""
    note = each.rewrite(unit)
    for program in unit.programs:
        program.traced.seal()
        program.passes = tuple(dict.fromkeys((*program.passes, each.name)))
        if watch is not None:
            watch(each.name, program, unit.settings.mesh)
    if note:
        unit.program.notes += (note,)
