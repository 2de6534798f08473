"""Predicted time of a pipelined step: every stage program is priced separately and inserted in the schedule.

The price lists the items of the rank with most work, and its idle time, because it covers the entire step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ..ir import info, source_of
from ..program import Hardware, Item, Line, Price, Program, price_of
from ..schedules import Action, Costs, Timeline, simulate
from .structure import PipelineStructure


def price_of_pipeline(program: PipelineStructure, hardware: Hardware, peak: int) -> Price:
    return _Priced(program, hardware).price(peak)


class _Priced:
    def __init__(self, program: PipelineStructure, hardware: Hardware) -> None:
        self.program, self.hardware, self.schedule = program, hardware, program.schedule
        self.link: Line = hardware.message(program.mesh, program.axis)
        self.works = {
            (kind, stage.index): self._of(
                work.following.program if self.schedule.microbatches > 1 else work.first.program
            )
            for stage in program.stages
            for kind, work in stage.works.items()
        }
        self.prologues = [self._of(prologue.program) for prologue in program.prologues]
        self.epilogue = [
            {rank: self._of(part.program) for rank, part in level.items()} for level in program.epilogue.parts
        ]
        self.exchanges = [self._exchanged(level) for level in range(len(program.epilogue.exchanges))]

    def price(self, peak: int) -> Price:
        timeline = self._timeline()
        before = max((price.seconds for price in self.prologues), default=0.0)
        seconds = before + timeline.makespan + self._ending()
        items = {rank: list(self._items(rank)) for rank in range(self.schedule.ranks)}
        rank = max(items, key=lambda rank: sum(item.exposed for item in items[rank]))
        idle = max(0.0, seconds - sum(item.exposed for item in items[rank]))
        listed = (*items[rank], Item("idle", (), "", "", seconds=idle, exposed=idle))
        ideal = sum(price.utilization * price.seconds * count for price, count in self._programs(rank))
        where = f"listed is rank {rank} of {self.schedule.ranks} along {self.program.axis!r}, which works longest"
        return Price(
            self.program.name,
            self.program.mesh,
            self.hardware,
            seconds,
            listed,
            peak,
            sum(item.flops for item in items[rank]),
            ideal / seconds if seconds else 0.0,
            (str(self.schedule.name), where, *self.program.notes),
        )

    def _of(self, program: Program) -> Price:
        return price_of(program.name, program.traced, program.mesh, self.hardware)

    def _timeline(self) -> Timeline:
        stages = range(self.schedule.stages)
        apart = any(kind == "I" for kind, _ in self.works)
        sent = [self.program.message(Action("F", stage, 0)) for stage in stages]  # nothing from the last stage
        return simulate(
            self.schedule,
            Costs(
                forward=[self._seconds("F", stage) for stage in stages],
                input_gradient=[self._seconds("I" if apart else "B", stage) for stage in stages],
                weight_gradient=[self._seconds("W", stage) for stage in stages],
                latency=self.link.alpha,
                message=[sum(info(node).aval.nbytes for node in nodes) for nodes in sent],
                bandwidth=1 / self.link.beta,
            ),
        )

    def _seconds(self, kind: str, stage: int) -> float:
        found = self.works.get((kind, stage % self.schedule.depth))
        return 0.0 if found is None else found.seconds

    def _ending(self) -> float:
        levels = [max((price.seconds for price in level.values()), default=0.0) for level in self.epilogue]
        return self.program.updates * (sum(levels) + sum(self.exchanges))

    def _exchanged(self, level: int) -> float:
        sent: Counter[int] = Counter()
        for node, source, _ in self.program.epilogue.exchanges[level]:
            sent[source] += info(node).aval.nbytes
        return max((self.link.seconds(size) for size in sent.values()), default=0.0)

    def _programs(self, rank: int) -> Iterator[tuple[Price, int]]:
        yield self.prologues[rank], 1
        counts = Counter((a.kind, a.stage % self.schedule.depth) for a in self.schedule.actions[rank])
        for key, count in counts.items():
            yield self.works[key], count
        for level in self.epilogue:
            if rank in level:
                yield level[rank], self.program.updates

    def _items(self, rank: int) -> Iterator[Item]:
        for price, count in self._programs(rank):
            for _ in range(count):
                yield from price.items
        yield from (self._send(node, phase) for node, phase in self.program.sends(rank))
        for level, exchanges in enumerate(self.program.epilogue.exchanges):
            own = [self._send(each.node, each.phase) for each in exchanges if each.source == rank]
            yield from (replace(item, exposed=self.exchanges[level] / len(own)) for item in own)

    def _send(self, node: object, phase: str) -> Item:
        size = info(node).aval.nbytes
        source = str(source_of(node) or "")
        return Item("send", (self.program.axis,), phase, source, sent=size, seconds=self.link.seconds(size))
