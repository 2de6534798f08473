"""Which depth, microbatch and schedule to train with: simulate every choice that fits in memory, take the fastest.

Deeper pipelines leave less to reduce over replicas and more bubble; smaller microbatches leave less bubble and cost
more overhead. No formula weighs these for a given model and machine, but a simulation takes milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..quantities import is_non_negative, is_positive, is_positive_int
from .actions import Schedule, ScheduleError
from .registry import FAMILIES, for_ranks, stages_for
from .simulate import Costs, Timeline, simulate

__all__ = ["Layer", "Machine", "Plan", "balanced_cut", "search"]

SYNCHRONOUS = tuple(name for name in FAMILIES if name not in ("pipedream", "2bw", "zb-auto"))


@dataclass(frozen=True)
class Layer:
    """What a layer of the model costs; times and activations are of one sample.

    Args:
        forward, input_gradient, weight_gradient: its times.
        activation: bytes that its forward keeps for its backward.
        output: bytes that it hands to the next layer.
        gradient: bytes of its weights' gradient, which replicas sum.
        state: bytes of its weights, their gradients and the optimizer's state.
        kept: by name, values that its forward keeps and others may too, in bytes of one sample: a stage holds each
            once, on top of `activation`.
        weights: by name, weights that other layers may use too, as (gradient, state): a rank holds each once, on top of
            the two above.

    Raises:
        ScheduleError: for a time or size that is no number of at least 0.
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
        """All its work on one sample."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class Machine:
    """What the layers run on, in the units of their times and bytes.

    Args:
        ranks: how many there are.
        memory: bytes per rank.
        latency, bandwidth: of a message between two stages.
        reduce_bandwidth: bytes per time that a rank sends while replicas sum gradients.
        overhead: time that an action takes however small its microbatch.

    Raises:
        ScheduleError: for what is no number of ranks, a negative time, or no room or rate at all.
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
class Plan:
    """A way to train, and what it was found to cost.

    Args:
        name: the schedule.
        depth: ranks of a pipeline.
        replicas: pipelines side by side, each with its part of the batch.
        microbatch: samples in a microbatch.
        cuts: the layers of each stage, as (first, one past the last).
        time: of a step, with the sum of gradients.
        memory: bytes of state, of the batch, and of what forwards keep, on the fullest rank; what an action takes while
            it runs, and messages, come on top.
        timeline: the simulated step of one pipeline.
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
        """The schedule to run."""
        return self.timeline.schedule


def search(
    layers: Sequence[Layer],
    machine: Machine,
    batch: int,
    names: Sequence[str] = SYNCHRONOUS,
    chunks: int = 2,
    sample: float = 0.0,
) -> list[Plan]:
    """All plans that fit, the fastest first.

    >>> from functional_parallel.schedules import Layer, Machine, search
    >>> layers = [Layer(1.0, 1.0, 1.0, activation=1.0, gradient=50.0, state=100.0)] * 8
    >>> search(layers, Machine(ranks=4, memory=350, reduce_bandwidth=10), batch=16, names=["gpipe", "1f1b", "zb-h1"])[0]
    Plan(name='zb-h1', depth=4, replicas=1, microbatch=1, time=102.0, memory=208.0)

    Tried are all depths that divide the ranks, all microbatches that divide a replica's part of the batch, and all
    schedules named, each with the layers cut into consecutive stages so that the slowest is fastest.
    Source: Athlur et al. 2022, Varuna: scalable, low-cost training of massive deep learning models, which takes the
    largest microbatch that fits; here all are tried.

    Args:
        layers: what each layer costs, in order.
        machine: what it runs on.
        batch: samples in a step, over all replicas.
        names: the schedules to try.
        chunks: stages per rank, for schedules that leave that open.
        sample: bytes of a sample of the batch, of which every rank of a pipeline holds its replica's part.

    Returns:
        The plans by time, then by memory.

    Raises:
        ScheduleError: when nothing fits; names what comes closest. For a batch or chunks that are no counts.
        TypeError: for a machine that is none, or one name where a list of them belongs.
    """
    check_search(machine, names, chunks)
    _require("search", "batch", batch, is_positive_int, "an integer of at least 1")
    plans = [_plan(*choice, sample * batch) for choice in _choices(layers, machine, batch, names, chunks)]
    fitting = [plan for plan in plans if plan.memory <= machine.memory]
    if fitting:
        return sorted(fitting, key=lambda plan: (plan.time, plan.memory))
    if not plans:
        raise ScheduleError(
            f"none of {', '.join(names)} can run {len(layers)} layers on {machine.ranks} ranks with a batch of "
            f"{batch}: a pipeline's depth must divide the ranks, its replicas the batch, and each stage needs a layer"
        )
    least = min(plans, key=lambda plan: plan.memory)
    raise ScheduleError(
        f"no plan fits in {machine.memory:g} bytes per rank; the smallest takes {least.memory:g}: {least!r}. Use more "
        "ranks, recompute activations, or shard the optimizer's state over replicas"
    )


def check_search(machine: object, names: object, chunks: object) -> None:
    """Refuse what would leave schedules out without a word, or stop somewhere within."""
    if not isinstance(machine, Machine):
        raise TypeError(f"machine= takes an fp.schedules.Machine(ranks=…, memory=…), not {machine!r}")
    if isinstance(names, str):
        raise TypeError(f"names= takes a list of schedules, [{names!r}], not one name")
    _require("search", "chunks", chunks, is_positive_int, "an integer of at least 1")


_Choice = tuple[Sequence[Layer], Machine, str, Schedule, int, int]


def _choices(
    layers: Sequence[Layer], machine: Machine, batch: int, names: Sequence[str], chunks: int
) -> Iterator[_Choice]:
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
                except ScheduleError:  # the schedule is not for these numbers
                    continue
                yield layers, machine, name, schedule, replicas, microbatch


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
) -> Plan:
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
    return Plan(name, schedule.ranks, replicas, microbatch, cuts, max(ends), memory, timeline)


def _activation(stage: Sequence[Layer]) -> float:
    kept = {name: size for layer in stage for name, size in layer.kept.items()}
    return sum(layer.activation for layer in stage) + sum(kept.values())


def _weights(schedule: Schedule, stages: Sequence[Sequence[Layer]], rank: int) -> tuple[float, float]:
    """Bytes of gradients and of all state on a rank; each chain has weights of its own."""
    own = [number for number, owner in enumerate(schedule.rank_of_stage) if owner == rank]
    layers = [(number // schedule.depth, layer) for number in own for layer in stages[number]]
    named = {(chain, name): sizes for chain, layer in layers for name, sizes in layer.weights.items()}
    gradient = sum(layer.gradient for _, layer in layers) + sum(size for size, _ in named.values())
    return gradient, sum(layer.state for _, layer in layers) + sum(size for _, size in named.values())


def balanced_cut(times: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Cut a list into consecutive parts, none empty, so that the largest sum is least.

    >>> from functional_parallel.schedules import balanced_cut
    >>> balanced_cut([1, 1, 1, 3, 2], 3)
    ((0, 3), (3, 4), (4, 5))

    Args:
        times: what each element costs.
        parts: how many parts, at most as many as elements.

    Returns:
        For each part the first element and one past the last.

    Raises:
        ScheduleError: for more parts than elements.
    """
    if not 1 <= parts <= len(times):
        raise ScheduleError(f"{len(times)} layers cannot be cut into {parts} stages of at least one layer")
    return _balanced_cut(tuple(times), parts)


@functools.lru_cache(maxsize=64)
def _balanced_cut(times: tuple[float, ...], parts: int) -> tuple[tuple[int, int], ...]:
    """Cut for `balanced_cut`; every schedule and microbatch of a depth shares the result."""
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    # best[end]: the least largest sum of the elements before `end` in the parts so far, and where the last one starts.
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
