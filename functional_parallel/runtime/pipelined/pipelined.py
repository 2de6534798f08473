"""Runtime of a pipeline: it wraps a mesh's runtime, which runs each single program over the other axes.

Messages between processes carry no derivatives. For a derivative from outside, every process simulates all ranks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from sharding_specs import Mesh, P, local_shape, whole_shape

from ... import _torch
from ...errors import PipelineError
from ...ir import Aval, hollow, info
from ...pipelines import (
    AsyncRankExecutor,
    Executor,
    PipelineProgram,
    RankExecutor,
    RunProgram,
    ScheduleRunner,
    slices_of,
)
from ...schedules import Action, Event, replay
from ..calls import READS
from ..execution import Log, Origin
from ..handles import Part, PipelineValue, copy_if_aliased
from ..interface import Runtime, Where
from ..processes import PointToPoint, ProcessCommunicator


class PipelineRuntime(Runtime[PipelineValue, PipelineProgram]):
    """Runs pipelines over one axis of the mesh of `base`. With `alone`, this process runs all ranks of the axis."""

    base: Any

    def __init__(self, base: Any, axis: str, *, alone: bool = False) -> None:
        self.base, self.axis = base, axis
        self.mesh: Mesh = base.mesh
        self.size = self.mesh.axis_size(axis)
        self.communicator: ProcessCommunicator | None = None if alone else getattr(base, "communicator", None)
        self.holders, self.algorithm, self.device = base.holders, base.algorithm, base.device
        self.is_simulated = base.is_simulated
        own = None if self.communicator is None else self.mesh.coordinates(base.rank)[axis]
        self.ranks = tuple(range(self.size)) if own is None else (own,)

    # --- handles ---

    def shard(self, x: torch.Tensor, spec: P) -> PipelineValue:
        return self._everywhere(self.base.shard(x, spec))

    def shard_for(self, program: PipelineProgram, number: int, x: torch.Tensor, spec: P) -> PipelineValue:
        return self._where_taken(program.holders(program.inputs[number]), x, spec)

    def shard_on(self, where: Where, x: torch.Tensor, spec: P) -> PipelineValue:
        return self._where_taken(frozenset(dict(where)[self.axis]), x, spec) if where else self.shard(x, spec)

    def entered(self, x: torch.Tensor, spec: P) -> PipelineValue:
        if self.communicator is not None:
            _refuse_derivatives([x])
        return self._everywhere(self.base.entered(x, spec))

    def own(self, x: torch.Tensor, spec: P) -> PipelineValue:
        return self._everywhere(self.base.own(x, spec))

    def whole(self, placed: PipelineValue, spec: P, whose: str = "") -> torch.Tensor:
        if placed.holders is None or placed.holders >= frozenset(range(self.size)):
            held = next(iter(placed.parts.values()))
        elif self.communicator is None:
            held = self._from_a_holder(placed)
        else:
            with self.base.turn, self.communicator.bound():
                self.communicator.doing.begin(READS + whose)
                held = self._from_a_holder(placed)
        result: torch.Tensor = self.base.whole(held, spec, whose)
        return result

    def _from_a_holder(self, placed: PipelineValue) -> Part:
        assert placed.holders is not None
        source = min(placed.holders)
        if self.communicator is None:
            return placed.parts[source]
        mine = placed.parts.get(self.ranks[0])
        if mine is None:
            mine = torch.empty(placed.aval.shape, dtype=placed.aval.dtype, device=self.base.device)
        assert isinstance(mine, torch.Tensor)
        return self.communicator.pbroadcast(mine, (self.axis,), source)

    def where(self, placed: PipelineValue) -> Where:
        return () if placed.holders is None else ((self.axis, tuple(sorted(placed.holders))),)

    def shard_of(self, placed: PipelineValue, spec: P, rank: int) -> torch.Tensor:
        part: torch.Tensor = self.base.shard_of(placed.parts[self.mesh.coordinates(rank)[self.axis]], spec, rank)
        return part

    def assemble(self, spec: P, where: Where, shard: Callable[[int], torch.Tensor]) -> PipelineValue:
        holders = dict(where).get(self.axis)
        here = [rank for rank in self.ranks if holders is None or rank in holders]
        shards: list[torch.Tensor] = []

        def seen(rank: int) -> torch.Tensor:  # simulated ranks of the pipeline share the shards of the first holder
            if holders is not None and self.communicator is None:
                rank = self.mesh.rank({**self.mesh.coordinates(rank), self.axis: holders[0]})
            shards.append(shard(rank))
            return shards[-1]

        base = self.base.assemble(spec, (), seen)
        device = (
            shards[0].device if self.communicator is None else self.base.device
        )  # a shard elsewhere has no memory here
        aval = Aval(tuple(shards[0].shape), shards[0].dtype, device)
        return PipelineValue(dict.fromkeys(here, base), None if holders is None else frozenset(holders), aval)

    def brought(self, program: PipelineProgram, placed: list[PipelineValue]) -> list[PipelineValue]:
        if self.communicator is None:
            return self._brought(program, placed)
        with self.base.turn, self.communicator.bound():
            self.communicator.doing.begin(READS)
            return self._brought(program, placed)

    def like(self, placed: PipelineValue, spec: P) -> torch.Tensor:
        return hollow(placed.aval, whole_shape(placed.aval.shape, spec, self.mesh))

    def _where_taken(self, holders: frozenset[int], x: torch.Tensor, spec: P) -> PipelineValue:
        aval = Aval(tuple(local_shape(x.shape, spec, self.mesh)), x.dtype, x.device)
        here = holders & frozenset(self.ranks)
        return PipelineValue(dict.fromkeys(here, self.base.entered(x, spec)) if here else {}, holders, aval)

    def _everywhere(self, handle: Part) -> PipelineValue:
        tensor = handle if isinstance(handle, torch.Tensor) else handle[0]
        aval = Aval(tuple(tensor.shape), tensor.dtype, tensor.device)
        return PipelineValue(dict.fromkeys(self.ranks, handle), None, aval)

    # --- running ---

    def run_whole(self, program: PipelineProgram, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.communicator is not None:
            self.base.agree_on(program)
            self.base.agree_on_inputs(program, tensors)
            if _torch.has_functorch_level(tensors):
                return PipelineRuntime(self.base, self.axis, alone=True).run_whole(program, tensors)
        given = zip(program.inputs, tensors, program.in_specs, strict=True)
        placed = [self._where_taken(program.holders(node), x, spec) for node, x, spec in given]
        results = self.run(program, placed)
        return [self.whole(x, spec) for x, spec in zip(results, program.out_specs, strict=True)]

    def run(
        self,
        program: PipelineProgram,
        placed: Sequence[PipelineValue],
        batch: Sequence[torch.Tensor] = (),
        whose: str = "",
    ) -> list[PipelineValue]:
        if self.communicator is None:
            return self._run(program, placed, self.base.run)
        self.base.agree_on(program)
        _refuse_derivatives([part for each in placed for part in each.parts.values()])
        with self.base.turn, self.communicator.bound(), torch.no_grad():  # once for all programs of the step
            self.base.begin(program, batch, whose)
            results = self._run(program, placed, self.base.run_plain)
        if program.events is not None:
            everywhere = self.base.exchange(program.events, "to compare times")
            program.events[:] = [event for events in everywhere for event in events]
        return results

    def replay(self, program: PipelineProgram, placed: Sequence[PipelineValue]) -> Origin | None:
        log = Log()
        run = partial(self.base.run_recorded, log)
        if self.communicator is None:
            self._run(program, placed, run)
            return None if log.first is None else replace(log.first, rank=None)
        self.base.agree_on(program)
        with self.base.turn, self.communicator.bound(), torch.no_grad():
            self.base.begin(program, whose=", op by op")
            self._run(program, placed, run)
        result: Origin | None = self.base.first_origin(log)
        return result

    def _run(self, program: PipelineProgram, placed: Sequence[PipelineValue], run: RunProgram) -> list[PipelineValue]:
        placed = self._brought(program, placed)
        self._give_up(program, placed)
        inputs = {rank: self._inputs(program, placed, rank) for rank in self.ranks}
        if program.schedule.versions is not None:
            return self._stream(program, inputs, run)
        ordered = self.communicator is None or self.communicator.reduction == "ordered"
        workers = {rank: RankExecutor(program, rank, run, inputs[rank], ordered) for rank in self.ranks}
        self._pass_through(program, workers)
        self._end(program, workers)
        return self._results(program, lambda rank, node: workers[rank].late_value(node))

    def _pass_through(self, program: PipelineProgram, workers: Mapping[int, Executor]) -> None:
        for worker in workers.values():
            worker.begin()
        if program.events is not None:
            program.events.clear()
        if self.communicator is None:
            self._in_lockstep(program, workers)
        else:
            self._executor(program).run_schedule(workers[self.ranks[0]])

    def _brought(self, program: PipelineProgram, placed: Sequence[PipelineValue]) -> list[PipelineValue]:
        """Send inputs to ranks that need them. A program with other stages may have left them on other ranks."""
        found = list(placed)
        for index, (node, each) in enumerate(zip(program.inputs, placed, strict=True)):
            needed = program.holders(node)
            if each.holders is None or needed <= each.holders:
                continue
            if info(node).is_parameter:
                _say_that_stages_moved(program, self.axis)
            holders, got = needed | each.holders, self._from_a_holder(each)
            parts = {rank: each.parts.get(rank, got) for rank in self.ranks if rank in holders}
            found[index] = PipelineValue(parts, holders, each.aval)
        return found

    def _give_up(self, program: PipelineProgram, placed: Sequence[PipelineValue]) -> None:
        """Free the copies of donated inputs on ranks that will not hold them. Give each other rank separate memory."""
        for node, each in zip(program.inputs, placed, strict=True):
            if not info(node).donated:
                continue
            holders = program.holders(node)
            for rank in each.parts.keys() - holders:
                del each.parts[rank]
            taken: set[int] = set()
            for rank in each.parts if len(each.parts) > 1 else ():
                each.parts[rank] = copy_if_aliased(each.parts[rank], taken)

    def _inputs(self, program: PipelineProgram, placed: Sequence[PipelineValue], rank: int) -> dict[fx.Node, Any]:
        return {node: each.parts[rank] for node, each in zip(program.inputs, placed, strict=True) if rank in each.parts}

    def _in_lockstep(self, program: PipelineProgram, workers: Mapping[int, Executor]) -> None:
        schedule = program.schedule
        for rank, action in replay(schedule):
            sent = self._timed(program, workers[rank], action)
            target = program.neighbour(action)
            if target is not None:
                workers[schedule.rank_of_stage[target]].receive(action, target, sent)

    def _timed(self, program: PipelineProgram, worker: Executor, action: Action) -> list[Any]:
        if program.events is None:
            return worker.act(action)
        start = self._now()
        sent = worker.act(action)
        program.events.append(Event(worker.rank, action, start, self._now()))
        return sent

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    @cached_property
    def mail(self) -> PointToPoint:
        """This rank's messages. The first access is a collective."""
        assert self.communicator is not None
        return PointToPoint(self.communicator, (self.axis,), self.ranks[0], self.base.device)

    def _executor(self, program: PipelineProgram) -> ScheduleRunner:
        return ScheduleRunner(program, self.mail, partial(self._timed, program))

    def _end(self, program: PipelineProgram, workers: dict[int, RankExecutor]) -> None:
        if self.communicator is not None:
            self._executor(program).run_epilogue(workers[self.ranks[0]])
            return
        for level, exchanges in enumerate(program.epilogue.exchanges):
            for worker in workers.values():
                worker.end(level)
            for node, source, target in exchanges:
                workers[target].late[node] = workers[source].late_value(node)

    def _results(self, program: PipelineProgram, value: Callable[[int, fx.Node], Any]) -> list[PipelineValue]:
        epilogue, declared = program.epilogue, self.base.declared
        results = zip(epilogue.outputs, epilogue.output_holders, epilogue.output_specs, program.out_specs, strict=True)
        return [
            PipelineValue(
                {rank: declared(value(rank, node), made, spec) for rank in self.ranks if rank in holders},
                holders,
                info(node).aval,
            )
            for node, holders, made, spec in results
        ]

    # --- asynchronous ---

    def _stream(
        self, program: PipelineProgram, inputs: dict[int, dict[fx.Node, Any]], run: RunProgram
    ) -> list[PipelineValue]:
        workers = {
            rank: AsyncRankExecutor(program, rank, run, held, slices_of(program, held, self._chunks))
            for rank, held in inputs.items()
        }
        self._pass_through(program, workers)
        program.cache["most versions"] = {rank: worker.most_versions for rank, worker in workers.items()}
        return self._results(program, lambda rank, node: self._last_or_mean(program, node, workers[rank]))

    def _chunks(self, handle: Part, count: int, dim: int) -> list[Part]:
        if isinstance(handle, torch.Tensor):
            return [part.contiguous() for part in handle.chunk(count, dim)]
        return [list(part) for part in zip(*(self._chunks(x, count, dim) for x in handle), strict=True)]

    def _last_or_mean(self, program: PipelineProgram, node: fx.Node, worker: AsyncRankExecutor) -> Part:
        if node in program.epilogue.replaces:
            last: Part = worker.results[-1][node]
            return last
        values = [made[node] for made in worker.results]
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values).mean(0)
        return [torch.stack(parts).mean(0) for parts in zip(*values, strict=True)]


def _say_that_stages_moved(program: PipelineProgram, axis: str) -> None:
    if program.cache.get("stages moved"):
        return
    program.cache["stages moved"] = True
    warnings.warn(
        f"{program.name} is cut into other stages than the program that made the state, so that ranks of {axis!r} send "
        "each other parameters first, whenever it follows upon that one. fp.stage_boundary(x) in the model, or stacked "
        "layers, cut it the same for batches of every shape, and for everything that is computed with it. Of an "
        "fp.Sharded, such as a loaded folder, compiled.hold(params, …) moves the parameters once",
        RuntimeWarning,
        stacklevel=2,
    )


def _refuse_derivatives(tensors: Sequence[Part]) -> None:
    if _torch.has_functorch_level(tensors):
        raise PipelineError(
            "a step's batch or state takes part in a derivative or a vmap, but what ranks of a pipeline in different "
            "processes send each other carries none: take it of the loss, and compile that"
        )
