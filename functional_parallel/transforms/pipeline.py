"""Pipeline parallelism: the ranks of an axis run the model's stages, and microbatches pass through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..collectives import MICROBATCH
from ..errors import PipelineError
from ..functions import LocalFunction, SpecTree, as_local_function, explain_keywords, layout_of
from ..ir import source
from ..pipelines import BALANCES, CutSpec, PipelineRequest, Stacks, unstacked
from ..requests import Microbatches, Order, owners_of
from ..schedules import FAMILIES, Schedule, check, for_ranks, get, stages_for
from .accumulate import microbatched
from .argument_specs import Rules, parameter_specs
from .transform import Transform

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
    """Cut the model into stages along an axis and stream microbatches through them.

    The gradient of the transformed function compiles to programs per stage. A schedule orders them: GPipe, 1F1B,
    interleaved, zero-bubble and others (docs/schedules.md). Losses with masks, sums or weights equal those of the full
    batch. The model is cut at calls of `fp.stage_boundary` in its code, or between stacked layers. Without either, the
    cut balances the stages. Any value may cross a cut. A parameter is stored on the ranks of the stages that use it.
    Other derivatives (`fp.hessian`, `fp.vmap`) run the microbatches sequentially on every rank of the axis, without a
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
        specs: rules or a tree of specs that identify stacks of layers. A parameter is a stack if its spec shards dim 0
            along the axis, `P("pipe", …)`. Equal groups of layers form the stages. The model reads a layer as
            `params["w"][i]`.
        microbatches: the number of microbatches per rank. If the rank's shard of the batch is not divisible, the last
            microbatches are one sample shorter.
        schedule: a name in `fp.schedules.FAMILIES` or its function, any `Schedule`, or a function of `stages` and
            `microbatches` that returns a `Schedule`.
        chunks: the number of stages per rank, for schedules that do not fix it. The default is 2 for "interleaved" and
            "looped-bfs", and 1 for a custom function. Other schedules reject any number except theirs.
        batch: specs of the arguments after the parameters over the axis "microbatch". The default cuts the dims that
            data axes split, or without data axes dim 0 of every tensor that has one.
        balance: the quantity to balance over the stages, without marks and stacks: "work", or "memory" of parameters
            and residuals.

    Raises:
        ValueError: if `microbatches` is not a positive integer, `balance` is unknown, `schedule` is not a schedule, or
            the schedule does not allow `chunks`.
        ScheduleError: if the schedule's name is unknown. When called, if the schedule does not support these numbers.
        PipelineError: when called, if the model cannot be cut in this way.
        SpecError: when called, if there are more microbatches than samples.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"pipeline(microbatches={microbatches!r}): give the number of microbatches, 1 or more")
    if balance not in BALANCES:
        raise ValueError(f"pipeline(balance={balance!r}): it is {' or '.join(map(repr, BALANCES))}")
    if isinstance(schedule, str):
        get(schedule)  # raises for an unknown name
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
        if isinstance(f, LocalFunction) and f.layout.all(Microbatches):
            raise PipelineError(
                f"{name} sums the gradients of its microbatches itself: leave fp.accumulate out, and give the pipeline "
                "as many times more microbatches"
            )
        inner = f
        if owners_of(layout_of(f)):
            raise PipelineError(
                f"{name} stands outside of {f!r}, where one rank holds all parameters; a pipeline's ranks hold those "
                "of their own stages: leave master= out"
            )
        if stacks is not None:
            inner = unstacked(f if isinstance(f, LocalFunction) else as_local_function(f), stacks)
        local = microbatched(inner, batch, name)
        return local.requesting(Microbatches(MICROBATCH, plan.summed_together), plan)

    return Transform(name, axis, Order.PIPELINE, apply)


class _Maker:
    """Creates the schedule for a number of ranks."""

    def __init__(
        self, schedule: str | Schedule | Callable[..., Schedule], microbatches: int, chunks: int | None, axis: str
    ) -> None:
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
        if ranks in self._found:
            return self._found[ranks]
        made = self._made(ranks)
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
        self._found[ranks] = check(made)
        return made

    def _made(self, ranks: int) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if not isinstance(self.schedule, str):
            return self.schedule(stages=ranks * (self.chunks or 1), microbatches=self.microbatches)
        return for_ranks(self.schedule, ranks, self.microbatches, self.chunks or 2)


def stage_boundary(x: T) -> T:
    """Mark in model code that all later ops belong to the pipeline's next stage.

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
        x: any value; it is returned unchanged. The values that cross the cut are found automatically: all values
            computed before it and used after it.

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
