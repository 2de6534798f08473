"""Search for the pipeline of a model: profile its layers on the graph, then simulate every way to run them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, overload

import optree
import torch

from sharding_specs import Mesh, register_dataclasses, tree_paths

from ..errors import ScheduleError
from ..functions import PyTree, as_local_function, grad
from ..ir import is_trained, without_memory
from ..lowering import lower_uncut
from ..optim import Optimizer, sgd
from ..pipelines import PipelineMemory
from ..quantities import is_positive_int
from ..schedules import Layer, Machine, ScheduleChoice, check_search
from ..schedules import search as search_plans
from ..training import train_step
from ..transforms import Plan, Transform, chain, data_parallel, pipeline
from .layer_profile import profile_layers

_SPEED = 1e12
_MARGIN = 2  # for values of the size of the weights: gradients of a microbatch, casts, and the update


@dataclass(frozen=True)
class PipelineChoice:
    """A way to run a model as a pipeline.

    Attributes:
        plan: schedule, depth, replicas, microbatch, and the predicted time and memory of a step.
        mesh: the required mesh, with axes "pipe" and "data". The replicas are along "data".
        transform: the transform of the model, `fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", …))`.
        lowered: function that lowers a training step once and returns its memory.
    """

    plan: ScheduleChoice
    mesh: Mesh
    transform: Plan = field(repr=False)
    lowered: Callable[[], PipelineMemory] = field(repr=False, compare=False)

    def memory(self) -> PipelineMemory:
        """Return the memory per rank of a training step, like `train_step(…).lower(…).memory()`. Lower it once."""
        return self.lowered()


def layer_costs(
    loss: Callable[..., PyTree],
    params: PyTree,
    *batch: PyTree,
    speed: float = _SPEED,
    optimizer: Optimizer | None = None,
    inner: Transform | Plan | None = None,
) -> list[Layer]:
    """Return the costs of the layers of a model for `fp.schedules.search`, from the graph of its gradient.

    Nothing is executed. The model may be cut where a cut sends no more bytes than at the adjacent positions. A layer is
    the ops between two such cuts, for example half a block of a transformer. Values that two layers save and weights
    that two layers use have names, so that a stage with both layers counts them once.

    >>> import torch, functional_parallel as fp
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.mean()
    >>> layers = fp.layer_costs(loss, [torch.empty(64, 64)] * 2, torch.empty(16, 64), optimizer=fp.optim.adamw(1e-3))
    >>> for layer in layers:                                   # products and tanh; bytes of gradient and of all state
    ...     print(f"{layer.time * 1e9:.0f} ns, sends {layer.output:g} B, {layer.weights}")
    41 ns, sends 256 B, {'0': (16384, 65536)}
    10 ns, sends 256 B, {}
    72 ns, sends 0 B, {'1': (16384, 65536)}

    Args:
        loss: a function from parameters and batch to a scalar.
        params: its parameters. They may be on the meta device.
        batch: an example of a batch, which may be on the meta device. Dim 0 of its tensors holds the samples. Costs are
            per sample.
        speed: flops per second that a rank achieves. A byte read or written counts as 8 flops.
        optimizer: an optimizer; its state per parameter is included in the state. Without it the state is parameters
            and gradients only.
        inner: transforms of the model inside the pipeline: `fp.mixed_precision(…)`, `fp.remat(…)`.

    Returns:
        The layers, in order. Times are in seconds, sizes in bytes.

    Raises:
        PipelineError: if the model cannot be pipelined, or has no trained parameters.
        ScheduleError: if the tensors of the batch have no samples, or different numbers of samples.
        ValueError: if `speed` is not positive.
        TypeError: if `optimizer` is not an optimizer.
    """
    return _profiled(loss, params, batch, speed, optimizer, inner)[0]


def _profiled(
    loss: Callable[..., PyTree],
    params: PyTree,
    batch: tuple[PyTree, ...],
    speed: float,
    optimizer: Optimizer | None,
    inner: Transform | Plan | None,
) -> tuple[list[Layer], float]:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer= takes an optimizer such as fp.optim.adamw(1e-3), not {optimizer!r}")
    if not speed > 0:
        raise ValueError(f"layer_costs(speed={speed!r}): give the flops per second that a rank gets done, above 0")
    samples = _samples(batch)
    whole = pipeline("pipe", microbatches=1)(loss if inner is None else inner(loss))
    register_dataclasses(params, batch)
    args = optree.tree_map(without_memory, (params, *batch))
    derivative, mesh = as_local_function(grad(whole)), Mesh(pipe=1)
    program, settings = lower_uncut(derivative, mesh, args, derivative.resolve(args, mesh))
    weights = _weights(args[0], optimizer or sgd(0.0))
    return profile_layers(program, settings, samples, speed, weights)


def search_pipeline(
    loss: Callable[..., PyTree],
    params: PyTree,
    *batch: PyTree,
    machine: Machine,
    speed: float = _SPEED,
    optimizer: Optimizer | None = None,
    inner: Transform | Plan | None = None,
    names: Sequence[str] | None = None,
    chunks: int = 2,
    most: int = 8,
    progress: Callable[[str], object] | bool | None = None,
) -> Sequence[PipelineChoice]:
    """Search depth, replicas, microbatch and schedule for a model on a machine. The fastest choice is first.

    If the machine limits memory, every returned choice fits. A choice is lowered to verify this (`choice.memory()`),
    unless an estimate is far below the limit. The call finds the first choice. Each later choice is found when it is
    read.

    >>> import torch, functional_parallel as fp
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.mean()
    >>> params, x = [torch.randn(64, 64) / 8 for _ in range(8)], torch.randn(16, 64)
    >>> machine = fp.schedules.Machine(ranks=4, memory=200e3, reduce_bandwidth=1e9)
    >>> best = fp.search_pipeline(loss, params, x, machine=machine, optimizer=fp.optim.adamw(1e-3))[0]
    >>> best.plan.depth, best.plan.replicas, best.mesh, best.memory().peak <= 200e3
    (4, 1, Mesh(pipe=4, data=1), True)
    >>> step = fp.compile(fp.grad(best.transform(loss)), best.mesh)
    >>> bool(torch.isclose(step(params, x)[0], fp.grad(loss)(params, x)[0], atol=1e-6).all())
    True

    Source: Athlur et al. 2022, Varuna: scalable, low-cost training of massive deep learning models.

    Args:
        loss, params, speed, optimizer, inner: as for `layer_costs`.
        batch: the global batch of a step, over all replicas. Only shapes are used.
        machine: ranks, memory in bytes, latency in seconds, bandwidths in bytes per second, and the overhead of an
            action in seconds.
        names: schedules to try; by default every synchronous schedule except "zb-auto".
        chunks: number of stages per rank, for schedules that do not fix it.
        most: maximum number of choices if the machine limits memory. Without a limit, all choices are returned.
        progress: a function that is called with a line of text after each step of the search. True writes the lines to
            stderr; False writes none. The default writes them if stderr is a terminal.

    Returns:
        The choices, as a list or `PipelineChoices`. The transform of a choice cuts the model so that work is balanced.

    Raises:
        ScheduleError: if nothing fits (the message names the smallest choice), `chunks` is not a positive integer, or
            `batch` is invalid as in `layer_costs`.
        PipelineError, ValueError: as for `layer_costs`; ValueError also if `most` is not a positive integer.
        TypeError: if `machine` is not a `Machine`, `optimizer` is not an optimizer, or `names` is a single name.
    """
    check_search(machine, names, chunks)
    if not is_positive_int(most):
        raise ValueError(f"search_pipeline(most={most!r}): how many choices to return is an integer of at least 1")
    report = _reporter(progress)
    (layers, working), samples = _profiled(loss, params, batch, speed, optimizer, inner), _samples(batch)
    report(f"measured {len(layers)} layers")
    shapes = optree.tree_map(without_memory, (params, *batch))
    held = sum(leaf.nbytes for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    options: dict[str, Any] = {} if names is None else {"names": names}
    plans = search_plans(layers, machine, samples, chunks=chunks, sample=held / samples, **options)
    report(f"simulated {len(plans)} plans; the fastest is {plans[0]!r}")
    lower = _Lowering(loss, optimizer or sgd(0.0), shapes)
    choices = [_choice(plan, inner, lower) for plan in plans]
    if math.isinf(machine.memory):
        return choices
    return PipelineChoices(choices, machine.memory, working, most, report)


def _reporter(progress: Callable[[str], object] | bool | None) -> Callable[[str], object]:
    if callable(progress):
        return progress
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return lambda line: None
    began = time.monotonic()
    return lambda line: print(f"search_pipeline, {time.monotonic() - began:.1f} s: {line}", file=sys.stderr, flush=True)


class _Lowering:
    def __init__(self, loss: Callable[..., PyTree], optimizer: Optimizer, shapes: tuple[PyTree, ...]) -> None:
        self.loss, self.optimizer, self.shapes = loss, optimizer, shapes
        self.programs: dict[Any, Any] = {}

    def __call__(self, plan: ScheduleChoice, mesh: Mesh, transform: Plan) -> PipelineMemory:
        schedule = plan.schedule
        work = tuple(frozenset((action.kind, action.stage) for action in row) for row in schedule.actions)
        key = mesh, schedule.microbatches, schedule.chains, schedule.rank_of_stage, work
        if schedule.versions is not None or key not in self.programs:
            lowered = train_step(self.loss, self.optimizer, mesh, transform).lower(*self.shapes)
            self.programs[key] = lowered
        found: PipelineMemory = replace(self.programs[key], schedule=schedule, cache={}).memory()
        return found


def _choice(plan: ScheduleChoice, inner: Transform | Plan | None, lower: _Lowering) -> PipelineChoice:
    mesh = Mesh(pipe=plan.depth, data=plan.replicas)
    outer = [data_parallel("data"), pipeline("pipe", schedule=plan.schedule, microbatches=plan.schedule.microbatches)]
    transform = chain(*outer) if inner is None else chain(inner, *outer)
    return PipelineChoice(plan, mesh, transform, cache(lambda: lower(plan, mesh, transform)))


class PipelineChoices(Sequence[PipelineChoice]):
    """Choices with a training step that fits in a memory limit, the fastest first.

    The constructor checks choices until the first one fits. Later choices are checked when they are read for the first
    time, because lowering takes seconds for a large model. A choice is lowered unless an upper estimate of its memory,
    with a margin, is within the limit. `len` reads all choices.

    Args:
        choices: all candidates, the fastest first.
        limit: bytes per rank.
        working: bytes per sample of the temporaries of all layers, in addition to the values saved for the backward.
        most: maximum number of choices to find.
        report: called with a line of text for each choice that is checked.
    """

    def __init__(
        self,
        choices: Sequence[PipelineChoice],
        limit: float,
        working: float,
        most: int,
        report: Callable[[str], object],
    ) -> None:
        self._working = working
        self._found: list[PipelineChoice] = []
        self._most, self._limit, self._report = most, limit, report
        self._remaining = self._fitting(choices)
        self._read(1)

    def _read(self, count: float) -> list[PipelineChoice]:
        while len(self._found) < min(count, self._most):
            following = next(self._remaining, None)
            if following is None:
                break
            self._found.append(following)
        return self._found

    def _fitting(self, choices: Sequence[PipelineChoice]) -> Iterator[PipelineChoice]:
        least: dict[tuple[str, int], int] = {}  # smallest microbatch that does not fit, per schedule and depth
        closest: PipelineChoice | None = None
        for choice in choices:
            plan = choice.plan
            key = plan.name, plan.depth
            if plan.microbatch >= least.get(key, plan.microbatch + 1):
                continue
            estimate = _MARGIN * plan.memory + self._working * plan.microbatch
            if estimate <= self._limit:
                self._report(f"{plan!r} takes less than {estimate:g} bytes per rank by an estimate, fits")
                yield choice
                continue
            peak = choice.memory().peak
            fits = peak <= self._limit
            self._report(f"{plan!r} takes {peak:g} bytes per rank, {'fits' if fits else 'does not fit'}")
            if fits:
                yield choice
                continue
            least[key] = plan.microbatch
            if closest is None or peak < closest.memory().peak:
                closest = choice
        if not self._found:
            assert closest is not None, "the search of plans raises when it finds none"
            raise ScheduleError(
                f"no plan's training step fits in {self._limit:g} bytes per rank; the smallest takes "
                f"{closest.memory().peak:g}: {closest.plan!r}. Use more ranks, recompute activations, or shard the "
                "optimizer's state over replicas"
            )

    @overload
    def __getitem__(self, index: int) -> PipelineChoice: ...
    @overload
    def __getitem__(self, index: slice) -> list[PipelineChoice]: ...
    def __getitem__(self, index: int | slice) -> PipelineChoice | list[PipelineChoice]:
        last = (index.stop or 0) - 1 if isinstance(index, slice) else index
        bounded = last >= 0 and not (isinstance(index, slice) and (index.start or 0) < 0)
        return self._read(last + 1 if bounded else math.inf)[index]

    def __len__(self) -> int:
        return len(self._read(math.inf))

    def __repr__(self) -> str:
        more = "" if len(self._found) == self._most else ", and those that are not lowered yet"
        return f"PipelineChoices({self._found!r}{more})"


def _weights(params: PyTree, optimizer: Optimizer) -> dict[str, tuple[int, int]]:
    """Return, per trained parameter, the bytes of its gradient, and of parameter, gradient and state together."""
    found = {}
    for path, leaf in zip(tree_paths(params), optree.tree_leaves(params), strict=True):
        if is_trained(leaf):
            state = optree.tree_leaves(optimizer.init([leaf]))
            held = sum(each.nbytes for each in state if isinstance(each, torch.Tensor) and each.ndim)
            found[path] = (leaf.nbytes, 2 * leaf.nbytes + held)
    return found


def _samples(batch: tuple[PyTree, ...]) -> int:
    sizes = {leaf.shape[0] for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise ScheduleError(
            f"dim 0 of a batch's tensors counts its samples, and here it is {sorted(sizes) or 'missing'}: give tensors "
            "with one number of samples, at least 1"
        )
    return int(sizes.pop())
