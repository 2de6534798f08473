"""Pipeline parallelism: the ranks of an axis run the model's stages, and microbatches pass through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import ClassVar, TypeVar

import optree
import torch

from sharding_specs import P, SpecError, tree_paths

from ..collectives import MICROBATCH
from ..errors import PipelineError
from ..functions import LocalFunction, PyTree, SpecTree, StackedTree, explain_keywords
from ..ir import source
from ..pipelines import BALANCES, CutSpec, PipelineRequest, unstacked
from ..quantities import is_positive_int
from ..requests import Microbatches, Order, owners_of
from ..schedules import FAMILIES, Schedule, check, for_ranks, get, stages_for
from .accumulate import microbatched
from .argument_specs import Rules, parameter_specs
from .as_code import as_code
from .transform import Transform

T = TypeVar("T")


@explain_keywords
@dataclass(frozen=True)
class pipeline(Transform):
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
        balance: the quantity to balance over the stages, without marks and stacks: "work", "memory" of parameters
            and residuals, or the number of "layers". Layers are told by the first number in the paths of parameters.
            This cut does not depend on the shapes of the batch.
        stages: the stage of each parameter, by patterns of paths: `{"layers/0-3": 0, "layers/4-7": 1}`, or
            `fp.device_map(…).stages`. The cut keeps the most bytes of parameters on their stages; the others are in
            `program.notes`.

    Raises:
        ValueError: if `microbatches` is not a positive integer, `balance` is unknown, `schedule` is not a schedule, or
            the schedule does not allow `chunks`.
        ScheduleError: if the schedule's name is unknown. When called, if the schedule does not support these numbers.
        PipelineError: when called, if the model cannot be cut in this way.
        SpecError: when called, if there are more microbatches than samples.
    """

    axis: str
    specs: Rules = None
    _: KW_ONLY
    microbatches: int
    schedule: str | Schedule | Callable[..., Schedule] = "1f1b"
    chunks: int | None = None
    batch: SpecTree = None
    balance: str = "work"
    stages: Mapping[str, int] | None = None
    order: ClassVar[Order] = Order.PIPELINE

    def __post_init__(self) -> None:
        schedule = self.schedule
        if not is_positive_int(self.microbatches):
            raise ValueError(
                f"pipeline(microbatches={self.microbatches!r}): give the number of microbatches, 1 or more"
            )
        if self.balance not in BALANCES:
            raise ValueError(f"pipeline(balance={self.balance!r}): it is {' or '.join(map(repr, BALANCES))}")
        if isinstance(schedule, str):
            get(schedule)  # raises for an unknown name
        elif not isinstance(schedule, Schedule) and not callable(schedule):
            raise ValueError(f"pipeline(schedule={schedule!r}): give a name such as '1f1b', a Schedule or a function")
        super().__post_init__()
        self._check_chunks()

    def _check_chunks(self) -> None:
        if self.chunks is None:
            return
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"pipeline(chunks={self.chunks!r}): give how many stages a rank holds, 1 or more")
        if isinstance(self._family, str):
            name, taken = self._family, stages_for(self._family, 1, self.chunks) == self.chunks
        else:
            name, taken = getattr(self._family, "name", ""), not isinstance(self._family, Schedule)
        if not taken:
            left_open = ", ".join(repr(name) for name, family in FAMILIES.items() if family.chunks is None)
            raise ValueError(
                f"pipeline(chunks={self.chunks}): {name!r} says itself how many stages a rank holds; leave chunks out, "
                f"or take a schedule that leaves it open: {left_open}, or a function of your own"
            )

    @property
    def _family(self) -> str | Schedule | Callable[..., Schedule]:
        known = (name for name, family in FAMILIES.items() if family.schedule is self.schedule)
        return next(known, self.schedule)

    @property
    def name(self) -> str:
        schedule = self.schedule
        own = getattr(schedule, "name", getattr(schedule, "__name__", "own"))
        return f"pipeline({self.axis!r}, {schedule if isinstance(schedule, str) else own!r}, {self.microbatches})"

    def schedule_for(self, ranks: int) -> Schedule:
        return _schedule(self, ranks)

    def apply(self, f: LocalFunction) -> LocalFunction:
        if f.applied.all(Microbatches):
            raise PipelineError(
                f"{self.name} sums the gradients of its microbatches itself: leave fp.accumulate out, and give the "
                "pipeline as many times more microbatches"
            )
        if owners_of(f.applied):
            raise PipelineError(
                f"{self.name} stands outside of {f}, where one rank holds all parameters; a pipeline's ranks hold "
                "those of their own stages: leave master= out"
            )
        plan = PipelineRequest(
            self.axis, MICROBATCH, self.schedule_for, CutSpec(self.balance, stages=self.stages or {})
        )
        lies = (f"{'by their stages' if self.specs is None else as_code(self.specs)} over {self.axis!r}", "")
        inner = unstacked(f, self._stacks, lies) if self.specs is not None else f.then(f.run, lies=lies)
        local = microbatched(inner, self.batch, self.name)
        return local.requesting(Microbatches(MICROBATCH, plan.summed_together), plan)

    def _stacks(self, params: PyTree) -> StackedTree:
        specs = parameter_specs(params, self.specs, self.axis, self.name, self.source)
        leaves = optree.tree_leaves(params)
        rows = zip(tree_paths(params), leaves, optree.tree_leaves(specs), strict=True)
        return StackedTree.of(params, [self._is_stack(*each) for each in rows])

    def _is_stack(self, path: str, leaf: PyTree, spec: P) -> bool:
        if self.axis not in spec.axes or not isinstance(leaf, torch.Tensor):
            return False
        if spec.dims[0] != (self.axis,):
            raise SpecError(
                f"{path}: {spec!r} does not cut dim 0, and nothing else of it, along {self.axis!r}; a pipeline's axis "
                "cuts the first dim of a stack of layers"
            )
        return True


@lru_cache(maxsize=256)
def _schedule(plan: pipeline, ranks: int) -> Schedule:
    made, own = _made(plan, ranks), plan.schedule
    if not isinstance(made, Schedule):
        raise PipelineError(f"the function {getattr(own, '__name__', own)!r} made a {type(made).__name__}, no Schedule")
    if made.ranks != ranks or made.microbatches != plan.microbatches:
        raise PipelineError(
            f"{made.name} is for {made.ranks} ranks and {made.microbatches} microbatches, but the axis {plan.axis!r} "
            f"has {ranks} ranks and pipeline(microbatches={plan.microbatches}); make it for these"
            + ("" if made is own else f"; it was asked for {ranks * (plan.chunks or 1)} stages")
        )
    return check(made)


def _made(plan: pipeline, ranks: int) -> Schedule:
    family = plan._family
    if isinstance(family, Schedule):
        return family
    if not isinstance(family, str):
        return family(stages=ranks * (plan.chunks or 1), microbatches=plan.microbatches)
    return for_ranks(family, ranks, plan.microbatches, plan.chunks or 2)


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
            f"{source.current_source()}: fp.stage_boundary() stands inside a function that the backward recomputes "
            "(fp.recompute, torch.utils.checkpoint) on one stage: put it before or after that function"
        )
    source.pass_stage_boundary()
    return x
