"""Memory simulator of a pipeline: runs the executor on sizes instead of tensors to measure each rank."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ...ir import Aval, info
from ...ops import MEMORIES, kind_of_memory
from ...program import MemoryUse, Program, Storage, StorageTable, extra_memory, kind_of_input
from ...schedules import Action, Receive, Send
from ..extract import Subprogram
from ..pipeline_memory import PIPELINE_KINDS, PipelineMemory
from ..stages import Stage
from ..structure import PipelineStructure
from .async_executor import AsyncRankExecutor, Executor
from .rank_executor import RankExecutor
from .schedule_runner import ScheduleRunner, slices_of

Row = tuple[int, str, str, str]  # a storage: bytes, kind, description, source line


def pipeline_memory(program: PipelineStructure) -> PipelineMemory:
    footprints = {part: _Footprint(part, kinds) for part, kinds in _programs(program)}
    ranks = [_OneRank(program, rank, footprints).memory() for rank in range(program.schedule.ranks)]
    if any(each.ledger.waits for each in footprints.values()):
        for each in footprints.values():
            each.put_in_flight()
        ranks = [_with_moves(use, _OneRank(program, rank, footprints).memory()) for rank, use in enumerate(ranks)]
    return PipelineMemory(program.name, program.axis, tuple(ranks))


def _with_moves(use: MemoryUse, in_flight: MemoryUse) -> MemoryUse:
    beside = {name: _with_moves(each, in_flight.beside[name]) for name, each in use.beside.items()}
    return replace(use, in_flight=in_flight.curve, beside=beside)


class SimulatedStorage:
    __slots__ = ("__weakref__", "kind", "size", "tally", "what", "where")

    def __init__(self, tally: _Tally, size: int, kind: str, what: str, where: str = "") -> None:
        self.tally, self.size, self.kind, self.what, self.where = tally, size, kind, what, where
        tally.alive += size
        tally.living.add(self)

    @property
    def row(self) -> Row:
        return self.size, self.kind, self.what, self.where

    def __del__(self) -> None:
        self.tally.alive -= self.size


Value = tuple[SimulatedStorage, ...]  # value of the executor: a tensor, or the results of an op with several


class _Tally:
    def __init__(self) -> None:
        self.alive = 0
        self.living: weakref.WeakSet[SimulatedStorage] = weakref.WeakSet()
        self.curve: list[int] = []
        self.peak = -1
        self.steps: list[str] = []
        self.most: dict[str, int] = {}
        self.largest: tuple[tuple[int, str, str], ...] = ()

    def note(self, step: str, beside: Sequence[Row] = ()) -> None:
        total = self.alive + sum(size for size, *_ in beside)
        if total > self.peak:
            self.peak = total
            rows = [*(each.row for each in self.living), *beside]
            self.most = {name: sum(size for size, kind, *_ in rows if kind == name) for name in PIPELINE_KINDS}
            largest = sorted((-size, f"{kind}: {what}", where) for size, kind, what, where in rows)[:8]
            self.largest = tuple((-size, what, where) for size, what, where in largest)
        self.curve.append(total)
        self.steps.append(step)

    def use(self, name: str) -> MemoryUse:
        return MemoryUse(name, tuple(self.curve), tuple(self.steps), self.most, self.largest)


class _Footprint:
    def __init__(self, program: Program, kinds: Sequence[str]) -> None:
        returned = [spec.memory for spec in program.out_specs]
        self.ledger, self.traced = StorageTable(program.name, program.traced, returned=returned), program.traced
        self.spans, self.last_uses = self.ledger.spans, self.ledger.last_uses
        self.left = [self.ledger.storages[output] for output in self.traced.outputs]  # one per result of the op
        self.inputs = [storage for node in self.traced.inputs for storage in self.ledger.storages[node]]
        self._kinds = {storage: kind for made, kind in zip(self.left, kinds, strict=True) for storage in made}
        self._at: dict[tuple[str, frozenset[Storage]], int] = {}
        constants = [node for node in self.traced.graph.nodes if node.op == "get_attr"]
        self.constants = {(node, 0): self.traced.constants[node.target] for node in constants}

    def put_in_flight(self) -> None:
        """Count moves from here on until a rank waits for them."""
        self.spans, self.last_uses = self.ledger.spans_in_flight, self.ledger.last_uses_in_flight
        self._at.clear()

    def _kind(self, storage: Storage) -> str:
        if storage in self._kinds:
            return self._kinds[storage] or self.ledger.kind(storage)
        found = self.ledger.kind(storage)
        return found if found in ("gathered", "gradients", "buckets", "transfers") else "temporaries"

    def peak(self, given_up: Mapping[Storage, Row], memory: str) -> tuple[str, list[Row]]:
        """Return the op with the most bytes in a memory, and its values. Inputs `given_up` live to their last use."""
        ledger, key = self.ledger, (memory, frozenset(given_up))
        spans = {**self.spans, **{storage: (0, self.last_uses.get(storage, 0)) for storage in given_up}}
        spans = {storage: span for storage, span in spans.items() if self.memory(storage) == memory}
        if key not in self._at:
            alive = ledger.alive(spans)
            self._at[key] = alive.index(max(alive)) if alive else 0
        at = self._at[key]
        living = [storage for storage, (born, dies) in spans.items() if born <= at <= dies]
        rows = [given_up[storage] if storage in given_up else self.row(storage) for storage in living]
        return ledger.op(at) if ledger.nodes else "", rows

    def memory(self, storage: Storage) -> str:
        return self.ledger.memories[storage[0]]

    def row(self, storage: Storage) -> Row:
        ledger = self.ledger
        return ledger.sizes[storage], self._kind(storage), ledger.title(storage), ledger.line(storage)


def _programs(program: PipelineStructure) -> Iterator[tuple[Program, list[str]]]:
    """Yield all programs of a pipeline with the kinds of their results; "" means the kind is taken from the program."""
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
            yield part.program, [_kind_of_replaced(replaces.get(node)) for node in part.outputs]


def _kinds_of_work(stage: Stage, kind: str, part: Subprogram, sums: int) -> list[str]:
    ordinary = part.outputs[: len(part.outputs) - sums]
    travels = set(stage.sends(kind)) - stage.kept_after(kind)
    return [*("messages" if node in travels else "residuals" for node in ordinary), *["gradients"] * sums]


def _kind_of_replaced(node: fx.Node | None) -> str:
    return "" if node is None or not info(node).is_state else kind_of_input(node)


class _OneRank:
    def __init__(self, program: PipelineStructure, rank: int, footprints: Mapping[Program, _Footprint]) -> None:
        self.program, self.rank, self.footprints = program, rank, footprints
        self.tallies, self.constants = {memory: _Tally() for memory in MEMORIES}, dict[int, SimulatedStorage]()
        self.tally = self.tallies["device"]
        self.step = ""
        self.sent: list[Value] = []  # kept until the next message is sent
        self.messages: defaultdict[int, list[int]] = defaultdict(list)  # bytes of the messages to each rank
        self.under_way: dict[Action, list[Value]] = {}
        parts = [footprints[part] for part in program.programs_of_rank(rank)]
        for memory in reversed(MEMORIES):  # of a number that both read, the host's
            for part in parts:
                for storage, tensor in part.constants.items():
                    if part.memory(storage) == memory:
                        self._constant(tensor, memory)

    def memory(self) -> MemoryUse:
        program = self.program
        inputs = {node: self._input(node) for node in program.inputs if self.rank in program.holders(node)}
        self.step = f"before the pipeline, rank {self.rank}"
        self._run_step(inputs)
        own = [one for part in program.programs_of_rank(self.rank) for one in part.collectives()]
        extra = extra_memory.current()
        shared = extra.of_collectives(own, program.mesh) + sum(map(extra.of_messages, self.messages.values()))
        name, (device, *others) = f"{program.name}, rank {self.rank} of {program.axis!r}", self.tallies.items()
        beside = {memory: tally.use(f"{name}, memory {memory!r}") for memory, tally in others if tally.peak > 0}
        return replace(device[1].use(name), shared=shared, beside=beside)

    def _run_step(self, inputs: dict[fx.Node, Value]) -> None:
        program, executor = self.program, ScheduleRunner(self.program, self, self._act)
        if program.schedule.versions is not None:
            slices = slices_of(program, inputs, lambda value, count, _: [value] * count)  # views of the batch
            executor.run_schedule(AsyncRankExecutor(program, self.rank, self.run, inputs, slices))
            return
        worker = RankExecutor(program, self.rank, self.run, inputs, ordered=True)
        worker.begin()
        executor.run_schedule(worker)
        self.step = f"after the pipeline, rank {self.rank}"
        executor.run_epilogue(worker)

    def _act(self, worker: Executor, action: Action) -> list[Value]:
        self.step = str(action)
        return worker.act(action)

    def _input(self, node: fx.Node) -> Value:
        size = info(node).aval.nbytes * (self.program.schedule.microbatches if node in self.program.cut_dims else 1)
        spec = info(node).spec
        tally = self.tally if spec is None else self.tallies[kind_of_memory(spec.memory)]
        return (SimulatedStorage(tally, size, kind_of_input(node), str(info(node).path or node.name)),)

    def _constant(self, tensor: torch.Tensor, memory: str = "device") -> SimulatedStorage:
        key = id(tensor)
        if key not in self.constants:
            self.constants[key] = SimulatedStorage(self.tallies[memory], tensor.nbytes, "other inputs", "a constant")
        return self.constants[key]

    def run(self, program: Program, values: list[Value]) -> list[Value]:
        found = self.footprints[program]
        given = dict(zip(found.inputs, (stored for value in values for stored in value), strict=True))
        values.clear()
        left = list(dict.fromkeys(storage for result in found.left for storage in result))
        made = {storage: given[storage] for storage in left if storage in given}
        given_up = _given_up(given, found.last_uses)
        for memory, tally in self.tallies.items():
            op, rows = found.peak(given_up, memory)
            tally.note(f"{self.step}: {op}" if op else self.step, rows)
        made |= {storage: self._constant(tensor) for storage, tensor in found.constants.items()}
        for storage in left:
            if storage not in made:
                made[storage] = SimulatedStorage(self.tallies[found.memory(storage)], *found.row(storage))
        return [tuple(made[storage] for storage in result) for result in found.left]

    def send(self, step: Send, values: list[Value]) -> None:
        self.sent = values
        self.messages[step.rank] += [value[0].size for value in values]

    def expect(self, step: Receive, avals: Sequence[Aval]) -> None:
        self.under_way[step.action] = [self._message(aval.nbytes, str(step)) for aval in avals]
        self.tally.note(str(step))

    def take(self, action: Action) -> list[Value] | None:
        if action not in self.under_way:
            return None
        target = self.program.neighbour(action)
        assert target is not None
        stage = self.program.stages[target % self.program.schedule.depth]
        kept = stage.kept_after("F" if action.kind == "F" else "I")
        values = self.under_way.pop(action)
        for node, value in zip(self.program.message(action), values, strict=True):
            if node in kept:
                value[0].kind = "residuals"
        return values

    def finish(self) -> None:
        self.sent = []

    def exchange(
        self, outgoing: Mapping[int, Sequence[Value]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[Value]]:
        if not outgoing and not incoming:
            return {}
        step = f"exchange with {', '.join(map(str, sorted({*outgoing, *incoming})))}"
        sizes = {rank: sum(value[0].size for value in values) for rank, values in outgoing.items()}
        for rank, size in sizes.items():
            self.messages[rank].append(size)
        joined = [self._message(size, step) for size in sizes.values()]
        found = {rank: [self._message(aval.nbytes, step) for aval in avals] for rank, avals in incoming.items()}
        self.tally.note(step)
        del joined
        return found

    def _message(self, size: int, what: str) -> Value:
        return (SimulatedStorage(self.tally, size, "messages", what),)


def _given_up(given: dict[Storage, SimulatedStorage], last_uses: Mapping[Storage, int]) -> dict[Storage, Row]:
    latest: dict[int, Storage] = {}
    for storage in sorted(given, key=lambda storage: last_uses.get(storage, 0)):
        latest[id(given[storage])] = storage
    watched = {storage: (weakref.ref(given[storage]), given[storage].row) for storage in latest.values()}
    given.clear()
    return {storage: row for storage, (stored, row) in watched.items() if stored() is None}
