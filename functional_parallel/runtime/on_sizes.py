"""A pipeline run without tensors: the executor itself, on values that are only sizes, to know what each rank holds.

A value is a `Stored`: the bytes of one storage, counted from when it is made until nothing refers to it any more. So
the executor's own code says how long residuals, sums and messages live, and how many there are at once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from ..pipelines import Part, PipelineMemory, PipelineProgram, Stage
from ..pipelines.memory import PIPELINE_KINDS
from ..program import Program
from ..program.memory import Ledger, Memory, Storage
from ..schedules import Action
from ..schedules.messages import Receive, Send
from ..tracing import Aval
from .pipelined import PipelineRuntime
from .stream import Stream
from .worker import Worker

__all__ = ["pipeline_memory"]

Row = tuple[int, str, str]  # of the largest values: bytes, what it is, source line


def pipeline_memory(program: PipelineProgram) -> PipelineMemory:
    """What the ranks of a pipeline hold in a step; see `PipelineProgram.memory`."""
    footprints = {part: _Footprint(part, kinds) for part, kinds in _programs(program)}
    ranks = tuple(_OneRank(program, rank, footprints).memory() for rank in range(program.schedule.ranks))
    return PipelineMemory(program.name, program.axis, ranks)


# -----------------------------------------------------------------------------
# What is alive
# -----------------------------------------------------------------------------


class Stored:
    """A storage without contents.

    Attributes:
        size: its bytes.
        kind: one of `PIPELINE_KINDS`.
        what, where: the op or input that it is of, and the source line.
    """

    __slots__ = ("__weakref__", "kind", "size", "tally", "what", "where")

    def __init__(self, tally: _Tally, size: int, kind: str, what: str, where: str = "") -> None:
        self.tally, self.size, self.kind, self.what, self.where = tally, size, kind, what, where
        tally.alive[kind] += size
        tally.living.add(self)

    def becomes(self, kind: str) -> None:
        """Count it as something else from now on."""
        self.tally.alive[self.kind] -= self.size
        self.tally.alive[kind] += self.size
        self.kind = kind

    def __del__(self) -> None:
        self.tally.alive[self.kind] -= self.size


Value = tuple[Stored, ...]  # what the executor passes around: a tensor, or the results of an op with several


class _Tally:
    """The bytes of what is alive, and how they were at their most."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.living: weakref.WeakSet[Stored] = weakref.WeakSet()
        self.curve: list[int] = []
        self.steps: list[str] = []
        self.most: dict[str, int] = {}
        self.largest: tuple[Row, ...] = ()

    def note(self, step: str, beside: Mapping[str, int], largest: Iterable[Row] = ()) -> None:
        """A point of the curve: what is alive, and what is alive beside it."""
        total = self.alive.total() + sum(beside.values())
        if total > max(self.curve, default=-1):
            self.most = {kind: self.alive[kind] + beside.get(kind, 0) for kind in PIPELINE_KINDS}
            held = ((each.size, f"{each.kind}: {each.what}", each.where) for each in self.living)
            self.largest = tuple(sorted((*held, *largest), key=lambda row: (-row[0], row[1:]))[:8])
        self.curve.append(total)
        self.steps.append(step)

    def memory(self, name: str) -> Memory:
        return Memory(name, tuple(self.curve), tuple(self.steps), self.most, self.largest)


# -----------------------------------------------------------------------------
# One program
# -----------------------------------------------------------------------------


class _Footprint:
    """What a program takes while it runs, beyond its inputs, and what it leaves.

    Attributes:
        beside: at its peak, the bytes of each kind beyond its inputs.
        largest: there, the largest values.
        at: the op.
        left: per result, its storages: several for what an op with several results made.
        inputs: the storages of its inputs, in order.
        constants: those of the constants that it takes.
    """

    def __init__(self, program: Program, kinds: Sequence[str]) -> None:
        self.ledger, self.traced = Ledger(program.name, program.traced), program.traced
        self.left = [self.ledger.storages[output] for output in self.traced.outputs]
        self.inputs = [storage for node in self.traced.inputs for storage in self.ledger.storages[node]]
        self._kinds = {storage: kind for made, kind in zip(self.left, kinds, strict=True) for storage in made}
        memory = self.ledger.memory()
        living = [storage for storage in self.ledger.living(memory.at) if storage in self.ledger.spans]
        beside: Counter[str] = Counter()
        for storage in living:
            beside[self._kind(storage)] += self.ledger.sizes[storage]
        self.beside, self.at = dict(beside), memory.ops[memory.at] if memory.curve else ""
        rows = [self.row(storage) for storage in living]
        self.largest = [(size, f"{kind}: {what}", where) for size, kind, what, where in sorted(rows, reverse=True)[:8]]
        constants = [node for node in self.traced.graph.nodes if node.op == "get_attr"]
        self.constants = {(node, 0): self.traced.constants[node.target] for node in constants}

    def _kind(self, storage: Storage) -> str:
        if storage in self._kinds:
            return self._kinds[storage] or self.ledger.kind(storage)
        found = self.ledger.kind(storage)
        return found if found in ("gathered", "gradients") else "temporaries"

    def row(self, storage: Storage) -> tuple[int, str, str, str]:
        """Size, kind, op and source line of a storage."""
        ledger = self.ledger
        return ledger.sizes[storage], self._kind(storage), ledger.title(storage), ledger.line(storage)


def _programs(program: PipelineProgram) -> Iterator[tuple[Program, list[str]]]:
    """All programs of a pipeline, with the kinds of their results; "" where the program itself says it."""
    for prologue in program.prologues:
        yield prologue.program, [""] * len(prologue.outputs)
    for stage in program.stages:
        for kind, work in stage.works.items():
            kinds = _kinds_of_work(stage, kind, work.first, len(work.totals))
            yield work.first.program, kinds
            yield work.following.program, kinds
            for part in work.totals.values():
                yield part.program, ["gradients"]
    replaces = program.epilogue.replaces
    for level in program.epilogue.parts:
        for part in level.values():
            yield part.program, [_kind_of_input(replaces.get(node)) for node in part.outputs]


def _kinds_of_work(stage: Stage, kind: str, part: Part, sums: int) -> list[str]:
    """What a stage's work makes: what is kept, what only travels on, and what is added up."""
    sent, kept = {
        "F": (stage.sends_forward, stage.after_forward),
        "I": (stage.sends_backward, stage.after_input),
        "B": (stage.sends_backward, frozenset()),
        "W": ((), frozenset()),
    }[kind]
    ordinary = part.outputs[: len(part.outputs) - sums]
    travels = {node for node in sent if node not in kept}
    return [*("messages" if node in travels else "residuals" for node in ordinary), *["gradients"] * sums]


def _kind_of_input(node: fx.Node | None) -> str:
    if node is None or not node.meta.get("carried"):
        return ""
    return "parameters" if node.meta.get("parameter") else "optimizer state"


# -----------------------------------------------------------------------------
# One rank
# -----------------------------------------------------------------------------


class _OneRank:
    """The runtime of a rank's single programs, and its mail: makes nothing, and counts what that would take."""

    def __init__(self, program: PipelineProgram, rank: int, footprints: Mapping[Program, _Footprint]) -> None:
        self.program, self.rank, self.footprints, self.mesh = program, rank, footprints, program.mesh
        self.carrier = SimpleNamespace(reduction="ordered")
        self.tally, self.constants = _Tally(), dict[int, Stored]()
        self.step = ""
        self.sent: list[Value] = []  # until the next message leaves
        self.under_way: dict[Action, list[Value]] = {}
        for part in program.programs_of_rank(rank):
            for tensor in footprints[part].constants.values():
                self._constant(tensor)

    def memory(self) -> Memory:
        """Run the rank's part of a step."""
        program = self.program
        inputs = {node: self._input(node) for node in program.inputs if self.rank in program.holders(node)}
        self.step = f"before the pipeline, rank {self.rank}"
        _OnSizes(self).step(program, self.rank, inputs)
        return self.tally.memory(f"{program.name}, rank {self.rank} of {program.axis!r}")

    # --- values ---

    def _input(self, node: fx.Node) -> Value:
        aval, kind = node.meta["val"], _kind_of_input(node)
        if not kind:
            kind = "parameters" if node.meta.get("parameter") else "other inputs"
        size = aval.nbytes * (self.program.schedule.microbatches if node in self.program.cut_dims else 1)
        return (Stored(self.tally, size, kind, str(node.meta.get("path", node.name))),)

    def _constant(self, tensor: torch.Tensor) -> Stored:
        key = id(tensor)
        if key not in self.constants:
            self.constants[key] = Stored(self.tally, tensor.nbytes, "other inputs", "a constant")
        return self.constants[key]

    # --- programs ---

    def run(self, program: Program, values: Sequence[Value]) -> list[Value]:
        """A program's results, and a point of the curve for its peak."""
        found = self.footprints[program]
        self.tally.note(f"{self.step}: {found.at}" if found.at else self.step, found.beside, found.largest)
        made = dict(zip(found.inputs, (stored for value in values for stored in value), strict=True))
        made |= {storage: self._constant(tensor) for storage, tensor in found.constants.items()}
        for storage in (storage for result in found.left for storage in result):
            if storage not in made:
                made[storage] = Stored(self.tally, *found.row(storage))
        return [tuple(made[storage] for storage in result) for result in found.left]

    # --- mail ---

    def send(self, step: Send, values: list[Value]) -> None:
        """A message lives until the next one leaves."""
        self.sent = values

    def expect(self, step: Receive, avals: Sequence[Aval]) -> None:
        """The memory for a message is there before the message."""
        self.under_way[step.action] = [self._message(aval.nbytes, str(step)) for aval in avals]
        self.tally.note(str(step), {})

    def take(self, action: Action) -> list[Value] | None:
        """What the backward needs of a message stays."""
        if action not in self.under_way:
            return None
        target = self.program.neighbour(action)
        assert target is not None
        stage = self.program.stages[target % self.program.schedule.depth]
        kept = stage.after_forward if action.kind == "F" else stage.after_input
        values = self.under_way.pop(action)
        for node, value in zip(self.program.message(action), values, strict=True):
            if node in kept:
                value[0].becomes("residuals")
        return values

    def finish(self) -> None:
        """Everything has arrived."""
        self.sent = []

    def exchange(
        self, outgoing: Mapping[int, Sequence[Value]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[Value]]:
        """Values of a kind travel end to end, in memory of their own."""
        if not outgoing and not incoming:
            return {}
        step = f"exchange with {', '.join(map(str, sorted({*outgoing, *incoming})))}"
        joined = [self._message(sum(value[0].size for value in values), step) for values in outgoing.values()]
        found = {rank: [self._message(aval.nbytes, step) for aval in avals] for rank, avals in incoming.items()}
        self.tally.note(step, {})
        del joined
        return found

    def _message(self, size: int, what: str) -> Value:
        return (Stored(self.tally, size, "messages", what),)


class _OnSizes(PipelineRuntime):
    """Runs one rank of a pipeline on values that are sizes."""

    def __init__(self, one: _OneRank) -> None:
        self.one, self.base, self.carrier, self.axis = one, one, one.carrier, one.program.axis
        self.ranks, self.mail = (one.rank,), one  # type: ignore[assignment]

    def step(self, program: PipelineProgram, rank: int, inputs: dict[fx.Node, Any]) -> None:
        """A step, without its results being joined."""
        if program.schedule.versions is not None:
            self._as_one_rank(program, Stream(program, rank, self.one, inputs, self._slices(program, inputs)))
            return
        worker = Worker(program, rank, self.one, inputs, ordered=True)
        worker.begin()
        self._as_one_rank(program, worker)
        self.one.step = f"after the pipeline, rank {rank}"
        self._end(program, {rank: worker})

    def _timed(self, program: PipelineProgram, worker: Worker | Stream, action: Action) -> list[Any]:
        self.one.step = str(action)
        return worker.act(action)

    def _chunks(self, handle: Any, count: int, dim: int) -> list[Any]:
        return [handle] * count  # views of the batch
