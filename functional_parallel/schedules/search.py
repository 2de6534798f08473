"""Search of depth, microbatch and schedule: simulate every choice that fits in memory, and sort by time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ScheduleError
from ..quantities import is_non_negative, is_positive, is_positive_int
from .actions import Schedule
from .families import FAMILIES, for_ranks, stages_for
from .simulate import Costs, Timeline, simulate

SYNCHRONOUS = tuple(name for name in FAMILIES if name not in ("pipedream", "2bw", "zb-auto"))


@dataclass(frozen=True)
class Layer:
    """Costs of a layer of the model. Times, `activation`, `output` and `kept` are for one sample.

    Args:
        forward, input_gradient, weight_gradient: times of F, I and W.
        activation: bytes that the forward saves for the backward.
        output: bytes that the layer sends to the next layer.
        gradient: bytes of the gradients of its weights, which replicas sum.
        state: bytes of its weights, their gradients and the optimizer state.
        kept: bytes per sample of saved values, by name. Several layers may save the same value; a stage holds it once.
            They are counted in addition to `activation`.
        weights: (gradient, state) bytes of weights, by name. Several layers may use the same weight; a rank holds it
            once per copy of the model. They are counted in addition to `gradient` and `state`.

    Raises:
        ScheduleError: if a time or size is not a number of at least 0.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    activation: float = 0.0
    output: float = 0.0
    gradient: float = 0.0
    state: float = 0.0
    kept: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient", "activation", "output", "gradient", "state"):
            _require("Layer", name, getattr(self, name), is_non_negative, "a number of at least 0")

    @property
    def time(self) -> float:
        """Total time of F, I and W for one sample."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class Machine:
    """Machine that runs the layers, in the units of their times and bytes.

    Args:
        ranks: number of ranks.
        memory: bytes per rank.
        latency, bandwidth: latency and bandwidth of a message between two stages.
        reduce_bandwidth: bytes per unit of time that a rank sends while replicas sum gradients.
        overhead: constant time of an action, independent of the size of its microbatch.

    Raises:
        ScheduleError: if `ranks` is not a positive integer, a time is negative, or a memory or bandwidth is not
            positive.
    """

    ranks: int
    memory: float = float("inf")
    latency: float = 0.0
    bandwidth: float = float("inf")
    reduce_bandwidth: float = float("inf")
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _require("Machine", "ranks", self.ranks, is_positive_int, "an integer of at least 1")
        for name in ("memory", "bandwidth", "reduce_bandwidth"):
            _require("Machine", name, getattr(self, name), is_positive, "a number above 0, in bytes")
        for name in ("latency", "overhead"):
            _require("Machine", name, getattr(self, name), is_non_negative, "a number of at least 0")


def _require(what: str, name: str, value: object, legal: Callable[[Any], bool], range_: str) -> None:
    if not legal(value):
        raise ScheduleError(f"{what}({name}={value!r}): it is {range_}")


@dataclass(frozen=True)
class ScheduleChoice:
    """A choice of schedule, depth and microbatch, with its predicted costs.

    Args:
        name: name of the schedule.
        depth: number of ranks of a pipeline.
        replicas: number of pipelines that run in parallel, each with its shard of the batch.
        microbatch: number of samples in a microbatch.
        cuts: layers of each stage, as (first, one past the last).
        time: time of a step, including the sum of gradients.
        memory: bytes of training state, batch and saved activations on the rank that holds most. It does not include
            the temporaries of a running action or messages.
        timeline: simulated step of one pipeline.
    """

    name: str
    depth: int
    replicas: int
    microbatch: int
    cuts: tuple[tuple[int, int], ...] = field(repr=False)
    time: float
    memory: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def schedule(self) -> Schedule:
        """Schedule to run."""
        return self.timeline.schedule


def search(
    layers: Sequence[Layer],
    machine: Machine,
    batch: int,
    names: Sequence[str] = SYNCHRONOUS,
    chunks: int = 2,
    sample: float = 0.0,
) -> list[ScheduleChoice]:
    """Return all plans that fit in memory, the fastest first.

    >>> from functional_parallel.schedules import Layer, Machine, search
    >>> layers = [Layer(1.0, 1.0, 1.0, activation=1.0, gradient=50.0, state=100.0)] * 8
    >>> search(layers, Machine(ranks=4, memory=350, reduce_bandwidth=10), batch=16, names=["gpipe", "1f1b", "zb-h1"])[0]
    ScheduleChoice(name='zb-h1', depth=4, replicas=1, microbatch=1, time=102.0, memory=208.0)

    The search covers all depths that divide the ranks, all microbatches that divide the batch of a replica, and all
    schedules in `names`. The layers are cut into consecutive stages so that the slowest stage is as fast as possible.
    Source: Athlur et al. 2022, Varuna: scalable, low-cost training of massive deep learning models. Varuna uses the
    largest microbatch that fits; this search tries all.

    Args:
        layers: costs of the layers, in order.
        machine: machine that runs them.
        batch: number of samples per step, over all replicas.
        names: schedules to try.
        chunks: number of stages per rank, for schedules that do not fix it.
        sample: bytes of one sample of the batch. Every rank of a pipeline holds all samples of its replica.

    Returns:
        The plans, sorted by time, then by memory.

    Raises:
        ScheduleError: if nothing fits (the message names the smallest plan), or if `batch` or `chunks` is not a
            positive integer.
        TypeError: if `machine` is not a `Machine`, or `names` is a single name.
    """
    check_search(machine, names, chunks)
    _require("search", "batch", batch, is_positive_int, "an integer of at least 1")
    plans = list(_plans(layers, machine, batch, names, chunks, sample))
    fitting = [plan for plan in plans if plan.memory <= machine.memory]
    if fitting:
        return sorted(fitting, key=lambda plan: (plan.time, plan.memory))
    if not plans:
        raise ScheduleError(
            f"none of {', '.join(names)} can run {len(layers)} layers on {machine.ranks} ranks with a batch of "
            f"{batch}. A pipeline's depth must divide the ranks, its replicas the batch, and each stage needs a layer"
        )
    least = min(plans, key=lambda plan: plan.memory)
    raise ScheduleError(
        f"no plan fits in {machine.memory:g} bytes per rank; the smallest takes {least.memory:g}: {least!r}. Use more "
        "ranks, recompute activations, or shard the optimizer's state over replicas"
    )


def check_search(machine: object, names: object, chunks: object) -> None:
    if not isinstance(machine, Machine):
        raise TypeError(f"machine= takes an fp.schedules.Machine(ranks=…, memory=…), not {machine!r}")
    if isinstance(names, str):
        raise TypeError(f"names= takes a list of schedules, [{names!r}], not one name")
    _require("search", "chunks", chunks, is_positive_int, "an integer of at least 1")


def _plans(
    layers: Sequence[Layer], machine: Machine, batch: int, names: Sequence[str], chunks: int, sample: float
) -> Iterator[ScheduleChoice]:
    for depth in _divisors(machine.ranks):
        replicas = machine.ranks // depth
        if batch % replicas:
            continue
        for microbatch in _divisors(batch // replicas):
            for name in names:
                if stages_for(name, depth, chunks) > len(layers):
                    continue
                try:
                    schedule = for_ranks(name, depth, batch // replicas // microbatch, chunks)
                except ScheduleError:  # outside the domain of the schedule
                    continue
                yield _plan(layers, machine, name, schedule, replicas, microbatch, sample * batch)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _plan(
    layers: Sequence[Layer],
    machine: Machine,
    name: str,
    schedule: Schedule,
    replicas: int,
    microbatch: int,
    batch: float,
) -> ScheduleChoice:
    cuts = balanced_cut([layer.time for layer in layers], schedule.depth)
    stages = [layers[first:end] for first, end in cuts] * schedule.chains

    def total(cost: str) -> list[float]:
        return [sum(getattr(layer, cost) for layer in stage) for stage in stages]

    def times(kind: str) -> list[float]:
        return [microbatch * time + machine.overhead for time in total(kind)]

    timeline = simulate(
        schedule,
        Costs(
            times("forward"),
            times("input_gradient"),
            times("weight_gradient"),
            latency=machine.latency,
            message=[microbatch * stage[-1].output for stage in stages],
            bandwidth=machine.bandwidth,
            activation=[microbatch * _activation(stage) for stage in stages],
        ),
    )
    reduced, held = zip(*(_weights(schedule, stages, rank) for rank in range(schedule.ranks)), strict=True)
    copies = replicas * schedule.chains
    ends = [
        row[-1].end + 2 * (copies - 1) / copies * size / machine.reduce_bandwidth
        for row, size in zip(timeline.events, reduced, strict=True)
    ]
    memory = batch / replicas + max(state + peak for state, peak in zip(held, timeline.peaks, strict=True))
    return ScheduleChoice(name, schedule.ranks, replicas, microbatch, cuts, max(ends), memory, timeline)


def _activation(stage: Sequence[Layer]) -> float:
    kept = {name: size for layer in stage for name, size in layer.kept.items()}
    return sum(layer.activation for layer in stage) + sum(kept.values())


def _weights(schedule: Schedule, stages: Sequence[Sequence[Layer]], rank: int) -> tuple[float, float]:
    """Return the bytes of gradients and of training state on one rank. Chains do not share weights."""
    own = [number for number, owner in enumerate(schedule.rank_of_stage) if owner == rank]
    layers = [(number // schedule.depth, layer) for number in own for layer in stages[number]]
    named = {(chain, name): sizes for chain, layer in layers for name, sizes in layer.weights.items()}
    gradient = sum(layer.gradient for _, layer in layers) + sum(size for size, _ in named.values())
    return gradient, sum(layer.state for _, layer in layers) + sum(size for _, size in named.values())


def balanced_cut(times: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Cut a list into consecutive non-empty slices so that the largest sum is minimal.

    >>> from functional_parallel.schedules import balanced_cut
    >>> balanced_cut([1, 1, 1, 3, 2], 3)
    ((0, 3), (3, 4), (4, 5))

    Args:
        times: cost of each element.
        parts: number of slices, not larger than the number of elements.

    Returns:
        For each slice, its first element and one past the last.

    Raises:
        ScheduleError: if `parts` is less than 1 or more than the number of elements.
    """
    if not 1 <= parts <= len(times):
        raise ScheduleError(f"{len(times)} layers cannot be cut into {parts} stages of at least one layer")
    return _balanced_cut(tuple(times), parts)


@functools.lru_cache(maxsize=64)
def _balanced_cut(times: tuple[float, ...], parts: int) -> tuple[tuple[int, int], ...]:
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    # best[end]: the minimal largest sum over slices of the elements before `end`, and the start of the last slice.
    best = [(total, 0) for total in sums]
    starts = []
    for part in range(2, parts + 1):
        best = [
            min(
                ((max(best[start][0], sums[end] - sums[start]), start) for start in range(part - 1, end)),
                default=(0, 0),
            )
            for end in range(len(sums))
        ]
        starts.append([start for _, start in best])
    cuts, end = [], len(times)
    for row in reversed(starts):
        cuts.append((row[end], end))
        end = row[end]
    return ((0, end), *reversed(cuts))
