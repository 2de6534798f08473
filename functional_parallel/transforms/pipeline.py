"""Pipeline parallelism: the model's stages on the ranks of an axis, microbatches passing through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..collectives import MICROBATCH
from ..functions import LocalFunction, SpecTree, as_local_function, explain_keywords
from ..ir import source
from ..pipelines import BALANCES, CutSpec, PipelineError, PipelineRequest, Stacks, unstacked
from ..schedules import FAMILIES, Schedule, check, for_ranks, get, stages_for
from .microbatched import microbatched
from .parallel import Rules, parameter_specs
from .transform import Order, Transform

__all__ = ["pipeline", "stage_boundary"]

T = TypeVar("T")


@explain_keywords
def pipeline(
    axis: str,
    specs: Rules = None,
    *,
    microbatches: int,
    schedule: str | Schedule | Callable[..., Schedule] = "1f1b",
    chunks: int | None = None,
    batch: SpecTree = None,
    balance: str = "work",
) -> Transform:
    """Cut the model into stages along an axis, and let microbatches stream through them.

    The gradient of the transformed function compiles to programs per stage that a schedule orders: GPipe, 1F1B,
    interleaved, zero-bubble and others (docs/schedules.md). Losses with masks, sums or weights are those of the whole
    batch. The model is cut where its code says `fp.stage_boundary`, between stacked layers, and without either where
    the work is in balance; anything may cross a cut. A parameter lives on the ranks whose stages use it. Other
    derivatives (`fp.hessian`, `fp.vmap`) run the microbatches one after another on every rank of the axis, without a
    schedule.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.mean()
    >>> params = [torch.eye(4)] * 4
    >>> plan = fp.pipeline("pipe", schedule="1f1b", microbatches=4)
    >>> step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2))
    >>> grads, value = step(params, torch.ones(8, 4))
    >>> bool(torch.isclose(value, loss(params, torch.ones(8, 4))))
    True
    >>> print(step.program.schedule)
    1f1b: 2 stages on 2 ranks, 4 microbatches
    rank 0  0F0  0F1  0B0  0F2  0B1  0F3  0B2  0B3
    rank 1  1F0  1B0  1F1  1B1  1F2  1B2  1F3  1B3

    Args:
        axis: the mesh axis.
        specs: which parameters are stacks of layers: those whose spec cuts dim 0 along the axis, `P("pipe", …)`, by
            rules or in a tree. Equal runs of layers make the stages; the model takes a layer as `params["w"][i]`.
        microbatches: into how many microbatches each rank's part of the batch is cut, the last ones a sample shorter
            where they cannot be equal.
        schedule: a name in `fp.schedules.FAMILIES`, or its function; a `Schedule`, your own too; or a function of
            `stages` and `microbatches` that makes one.
        chunks: how many stages a rank holds, for schedules that leave it open: 2 by default for "interleaved" and
            "looped-bfs", 1 for a function of your own. Others refuse another number than theirs.
        batch: how the arguments after the parameters are cut, as specs over the axis "microbatch"; by default the dims
            that data axes split, or without these dim 0 of every tensor that has one.
        balance: without marks, what the stages have equal parts of: "work", or "memory" of parameters and residuals.

    Raises:
        ValueError: when there is not at least one microbatch, no such balance, no schedule, or chunks it does not take.
        ScheduleError: when there is no such schedule; when called, if it is not made for these numbers.
        PipelineError: when called, if the model cannot be cut so.
        SpecError: when called, if there are more microbatches than samples.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"pipeline(microbatches={microbatches!r}): give the number of microbatches, 1 or more")
    if balance not in BALANCES:
        raise ValueError(f"pipeline(balance={balance!r}): it is {' or '.join(map(repr, BALANCES))}")
    if isinstance(schedule, str):
        get(schedule)  # an unknown name is refused here
    elif not isinstance(schedule, Schedule) and not callable(schedule):
        raise ValueError(
            f"pipeline(schedule={schedule!r}): give a name such as '1f1b', an fp.schedules.Schedule (Schedule.of makes "
            "one of text), or a function of stages and microbatches"
        )
    title = schedule if isinstance(schedule, str) else getattr(schedule, "name", getattr(schedule, "__name__", "own"))
    name = f"pipeline({axis!r}, {title!r}, {microbatches})"
    stacks = None if specs is None else Stacks(axis, parameter_specs(specs, axis, name))
    plan = PipelineRequest(axis, MICROBATCH, _Maker(schedule, microbatches, chunks, axis), CutSpec(balance, stacks))

    def apply(f: Callable[..., Any]) -> LocalFunction:
        if isinstance(f, LocalFunction) and f.layout.virtual:
            raise PipelineError(
                f"{name} sums the gradients of its microbatches itself: leave fp.accumulate out, and give the pipeline "
                "as many times more microbatches"
            )
        inner = f
        if stacks is not None:
            inner = unstacked(f if isinstance(f, LocalFunction) else as_local_function(f), stacks)
        local = microbatched(inner, batch, name)
        virtual = ((MICROBATCH, plan.summed_together), *local.layout.virtual)
        return local.with_layout(replace(local.layout, virtual=virtual, pipeline=plan))

    return Transform(name, axis, Order.PIPELINE, apply)


class _Maker:
    """Makes the schedule for a number of ranks."""

    def __init__(self, schedule: Any, microbatches: int, chunks: int | None, axis: str) -> None:
        known = (name for name, family in FAMILIES.items() if family.schedule is schedule)
        self.schedule = next(known, schedule)
        self.microbatches, self.chunks, self.axis = microbatches, chunks, axis
        self._found: dict[int, Schedule] = {}
        self._check_chunks()

    def _check_chunks(self) -> None:
        if self.chunks is None:
            return
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"pipeline(chunks={self.chunks!r}): give how many stages a rank holds, 1 or more")
        if isinstance(self.schedule, str):
            name, taken = self.schedule, stages_for(self.schedule, 1, self.chunks) == self.chunks
        else:
            name, taken = getattr(self.schedule, "name", ""), not isinstance(self.schedule, Schedule)
        if not taken:
            left_open = ", ".join(repr(name) for name, family in FAMILIES.items() if family.chunks is None)
            raise ValueError(
                f"pipeline(chunks={self.chunks}): {name!r} says itself how many stages a rank holds; leave chunks out, "
                f"or take a schedule that leaves it open: {left_open}, or a function of your own"
            )

    def __call__(self, ranks: int) -> Schedule:
        if ranks not in self._found:
            self._found[ranks] = self._checked(ranks)
        return self._found[ranks]

    def _checked(self, ranks: int) -> Schedule:
        made = self.schedule if isinstance(self.schedule, Schedule) else self._made(ranks)
        if not isinstance(made, Schedule):
            raise PipelineError(
                f"the function that shall make the schedule, {getattr(self.schedule, '__name__', self.schedule)!r}, "
                f"made a {type(made).__name__}; it returns an fp.schedules.Schedule (Schedule.of makes one of text)"
            )
        if made.ranks != ranks or made.microbatches != self.microbatches:
            raise PipelineError(
                f"{made.name} is for {made.ranks} ranks and {made.microbatches} microbatches, but the axis "
                f"{self.axis!r} has {ranks} ranks and pipeline(microbatches={self.microbatches}); make it for these"
                + ("" if made is self.schedule else f"; it was asked for {ranks * (self.chunks or 1)} stages")
            )
        return check(made)

    def _made(self, ranks: int) -> Schedule:
        if not isinstance(self.schedule, str):
            return self.schedule(stages=ranks * (self.chunks or 1), microbatches=self.microbatches)
        return for_ranks(self.schedule, ranks, self.microbatches, self.chunks or 2)


def stage_boundary(x: T) -> T:
    """Say in model code that what is computed from here on belongs to the pipeline's next stage.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(params, x):
    ...     h = torch.tanh(x @ params["first"])
    ...     h = fp.stage_boundary(h)
    ...     return (h @ params["second"]).sum()
    >>> params = {"first": torch.eye(2), "second": torch.eye(2)}
    >>> plan = fp.pipeline("pipe", schedule="gpipe", microbatches=2)
    >>> step = fp.compile(fp.grad(plan(loss)), Mesh(pipe=2))
    >>> step(params, torch.ones(4, 2))["second"]
    tensor([[3.0464, 3.0464],
            [3.0464, 3.0464]])

    Args:
        x: anything; it is returned as it is. What crosses the cut is found out, not said: all values from before that
            are used after.

    Raises:
        PipelineError: inside a function marked by `fp.recompute`.
    """
    if source.is_in_region():
        raise PipelineError(
            f"{source.current_source()}: fp.stage_boundary() stands inside a function whose inside is computed again "
            "for the backward (fp.recompute, torch.utils.checkpoint), and a block is computed again on one stage: put "
            "it before or after that function"
        )
    source.pass_stage_boundary()
    return x
