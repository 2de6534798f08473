"""Programs of the stages of a pipelined step, with the schedule that orders them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ..errors import PipelineError
from ..ir import info, source_of
from ..ops import attention_notes
from ..program import Collective, Hardware, HostOp, MemoryMove, Price, bytes_of, counts_of, hardware_of
from ..quantities import readable_bytes
from ..schedules import Action, Event, Timeline, peaks
from .execution import pipeline_memory
from .pipeline_memory import PipelineMemory
from .pipeline_price import price_of_pipeline
from .structure import PipelineStructure


@dataclass(eq=False)
class PipelineProgram(PipelineStructure):
    """Programs that the ranks of a pipeline run in a step. Like a `Program`, but each rank of the axis has its own."""

    events: list[Event] | None = None  # the last run's actions with their times; None unless `record` was called

    def record(self) -> None:
        """Record the times of every later action, for `timeline`. The device is synchronized before and after each."""
        self.events = []

    def timeline(self) -> Timeline:
        """Return the times of the last run's actions in seconds, on the ranks with other coordinates 0.

        Raises:
            PipelineError: if `record` was not called before the run.
        """
        if not self.events:
            raise PipelineError("nothing was recorded: call program.record() and run a step first")
        first = min(event.start for event in self.events)
        rows: list[dict[Action, Event]] = [{} for _ in self.schedule.actions]
        for event in self.events:
            shifted = event._replace(start=event.start - first, end=event.end - first)
            rows[event.rank].setdefault(event.action, shifted)
        return Timeline(
            self.schedule, tuple(tuple(row.values()) for row in rows), tuple(map(float, peaks(self.schedule)))
        )

    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """Return every collective of a step, over all ranks of the pipeline. Messages between stages are sends."""
        found = [one for program, count in self.programs() for one in program.collectives(casts=casts) * count]
        return [*found, *self._sends()]

    def moves(self) -> list[MemoryMove]:
        return [one for program, count in self.programs() for one in program.moves() * count]

    def _sends(self) -> Iterator[Collective]:
        for rank in range(self.schedule.ranks):
            yield from (self._send(node, phase) for node, phase in self.sends(rank))
        for level in self.epilogue.exchanges:
            yield from (self._send(exchange.node, exchange.phase) for exchange in level)

    def _send(self, node: fx.Node, phase: str) -> Collective:
        value = info(node).aval
        return Collective("send", (self.axis,), value, value, value.nbytes, source_of(node), phase, node)

    def per_microbatch(self) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
        """Return count and bytes of the collectives that every microbatch runs, without messages between stages.

        With ZeRO stages 0 to 2 there are none: the loss and gradients are summed, and parameters gathered, once per
        step. ZeRO-3 gathers a stage's parameters for every forward and backward, except with `keep_gathered`.
        """
        found: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
        for program, runs in self.stage_programs():
            collectives, share = program.collectives(), runs / self.schedule.microbatches
            sizes = bytes_of(collectives)
            for key, count in counts_of(collectives).items():
                before = found.get(key, (0.0, 0.0))
                found[key] = before[0] + count * share, before[1] + sizes[key] * share
        return found

    def host_ops(self) -> list[HostOp]:
        return list(dict.fromkeys(each for program in self.every_program() for each in program.host_ops()))

    def remarks(self) -> tuple[str, ...]:
        size = self.mesh.axis_size(self.axis)
        anew = [
            f"{count:g} {kind} over {', '.join(axes)}, {readable_bytes(round(sent))}"
            for (kind, axes), (count, sent) in self.per_microbatch().items()
        ]
        each = f"of these, each of {self.schedule.microbatches} microbatches does anew: {'; '.join(anew)}"
        sums = f"counts and bytes are sums over the {size} ranks of {self.axis!r}"
        attention = dict.fromkeys(note for each in self.every_program() for note in attention_notes(each.traced))
        return (*self.notes, *attention, sums, *[each] * bool(anew))

    def price(self, hardware: Hardware | str = "h100") -> Price:
        """Predict the time of a step like `Program.price`. The items belong to the rank with most work."""
        return price_of_pipeline(self, hardware_of(hardware), self.memory().peak)

    def memory(self) -> PipelineMemory:
        """Return the bytes of live tensors on the ranks of the pipeline, for each program as in `Program.memory()`.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = torch.tanh(x @ w)
        ...     return x.sum()
        >>> step = fp.compile(fp.grad(fp.pipeline("pipe", microbatches=8)(loss)), Mesh(pipe=4))
        >>> memory = step.lower([torch.ones(8, 8)] * 4, torch.ones(64, 8)).memory()
        >>> [rank.peak > 0 for rank in memory.ranks], memory.peak == max(rank.peak for rank in memory.ranks)
        ([True, True, True, True], True)

        The count covers the memory of a rank in every step after the first. It contains the parameters and optimizer
        state of the rank's stages, the batch, sums of gradients, residuals of microbatches in flight, messages, and
        temporaries of programs. Microbatches are summed in order, as with `reduction="ordered"`; "fast" needs no more.
        """
        return pipeline_memory(self)

    def lines(self) -> list[str]:
        """Return the text of all programs without source lines. Pipelines have equal text iff they do the same."""
        lines = [f"mesh {self.mesh!r}", *str(self.schedule).splitlines()]
        for program, count in self.programs():
            lines += [f"{program.name}, {count} times", *program.lines()]
        return lines

    def __str__(self) -> str:
        texts = [f"{program}\n({count} times a step)" for program, count in self.programs()]
        return "\n\n".join([f"{self.name} on {self.mesh!r}", str(self.schedule), *texts])
