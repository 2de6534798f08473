"""Cost of a collective: rounds × latency + bytes × time per byte (the α-β model), from three measurements.

The measurements run once per process group and take tens of milliseconds. They time messages between neighbours, shared
memory, and the backend's own collectives. The cost of an algorithm follows from its rounds, messages and bytes, by the
formulas of the original papers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...program import Line
from ..buffers import ordered_sum
from ..calls import CollectiveSteps
from ..shared_memory import shared
from .algorithm_group import AlgorithmGroup
from .halving import is_power_of_two

__all__ = ["COLLECTIVE_KINDS", "AlgorithmCost", "Line", "MeasuredCosts", "algorithm_cost", "fitted", "measure_group"]

COLLECTIVE_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_SIZES = (1 << 12, 1 << 20)
_BATCH, _MOST_BATCHES = 3, 5
_SECONDS = 0.06
_IN_A_ROUND = 4


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line to measurements by least squares of relative errors.

    >>> print(fitted([1_000, 100_000, 1_000_000], [51e-6, 150e-6, 1050e-6]))
    50 µs + n / 1.0 GB/s
    """
    rows = torch.tensor([[1 / t, n / t] for n, t in zip(sizes, seconds, strict=True)], dtype=torch.float64)
    scale = rows.norm(dim=0)
    alpha, beta = (
        torch.linalg.lstsq(rows / scale, torch.ones(len(rows), 1, dtype=rows.dtype)).solution[:, 0] / scale
    ).tolist()
    if min(alpha, beta) <= 0:  # lost in noise: no latency, or the largest time per byte for every byte
        return Line(max(alpha, 0.0), max(t / n for n, t in zip(sizes, seconds, strict=True) if n == max(sizes)))
    return Line(alpha, beta)


@dataclass(frozen=True)
class MeasuredCosts:
    """Measurements of a group, each by its slowest rank.

    Attributes:
        message: one message each to and from a neighbour, between hosts if there are several.
        further: seconds for each additional message of a round.
        memory: one round through shared memory, and the cost of each byte that a rank writes or reads there. None if no
            memory is shared, or no collective can use it, as on hosts with different numbers of ranks.
        whole: by algorithm and kind, collectives that were timed directly: the backend's own, and shared-memory
            collectives if all ranks share memory.
    """

    message: Line
    further: float
    memory: Line | None
    whole: dict[tuple[str, str], Line]


@dataclass(frozen=True)
class AlgorithmCost:
    """Work of the busiest rank in an algorithm. Byte counts are multiples of the collective's size.

    Attributes:
        rounds: number of sequential rounds of messages.
        messages: number of messages that it sends.
        sent: bytes sent.
        signals: number of rounds through shared memory.
        copied: bytes written to or read from shared memory.
    """

    rounds: int = 0
    messages: int = 0
    sent: float = 0.0
    signals: int = 0
    copied: float = 0.0

    def __add__(self, other: AlgorithmCost) -> AlgorithmCost:
        return AlgorithmCost(
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.sent + other.sent,
            self.signals + other.signals,
            self.copied + other.copied,
        )

    def seconds(self, size: float, machine: MeasuredCosts) -> float:
        """Return the duration of a collective of `size` bytes."""
        messages = self.rounds * machine.message.alpha + (self.messages - self.rounds) * machine.further
        memory = machine.memory or Line(0.0, 0.0)
        return (
            messages
            + self.sent * size * machine.message.beta
            + self.signals * memory.alpha
            + self.copied * size * memory.beta
        )

    def __str__(self) -> str:
        sent = f"{_count(self.rounds, 'round')}, {self.sent:.3g} n sent" if self.rounds else ""
        copied = f"{_count(self.signals, 'signal')}, {self.copied:.3g} n through memory" if self.signals else ""
        return ", ".join(filter(None, (copied, sent)))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# -----------------------------------------------------------------------------
# The formulas
# -----------------------------------------------------------------------------


def algorithm_cost(name: str, kind: str, ranks: int, hosts: int = 1, size: int = 1 << 30) -> AlgorithmCost | None:
    """Return the work of an algorithm for a collective of n bytes: operand of a sum or exchange, result of a gather.

    >>> print(algorithm_cost("ring", "all_reduce", 4))
    6 rounds, 1.5 n sent
    >>> print(algorithm_cost("naive", "all_reduce", 4))
    2 rounds, 6 n sent

    Args:
        name: a name in `ALGORITHMS`.
        kind: one of `COLLECTIVE_KINDS`.
        ranks: number of ranks.
        hosts: number of hosts, with equal numbers of ranks.
        size: n; small collectives may use a different method.

    Returns:
        The work; None if the algorithm does not have this collective.
    """
    if name == "shared":
        return _shared(kind, ranks, size)
    if kind == "all_to_all":
        return AlgorithmCost(1, ranks - 1, (ranks - 1) / ranks) if name == "direct" else None
    if name == "naive":
        return _naive(kind, ranks)
    phase = (
        _two_level(ranks // hosts, hosts)
        if name == "two_level"
        else {kind: _phase(name, ranks) for kind in COLLECTIVE_KINDS}
    )
    return phase["reduce_scatter"] + phase["all_gather"] if kind == "all_reduce" else phase[kind]


def _phase(name: str, ranks: int) -> AlgorithmCost:
    """Return half an all-reduce: every algorithm sends p − 1 chunks of n / p bytes."""
    sent = (ranks - 1) / ranks
    if name == "direct":
        return AlgorithmCost(1, ranks - 1, sent)
    rounds = int(log2(ranks)) if name == "halving" and is_power_of_two(ranks) else ranks - 1
    return AlgorithmCost(rounds, rounds, sent)


def _naive(kind: str, ranks: int) -> AlgorithmCost:
    if kind == "all_reduce":
        return AlgorithmCost(2, 2 * (ranks - 1), 2.0 * (ranks - 1))
    return AlgorithmCost(2, (ranks + 1) * (ranks - 1), (ranks - 1) * (1 + 1 / ranks))


def _shared(kind: str, ranks: int, size: int) -> AlgorithmCost:
    """Return the work of writing n bytes or a chunk of them, and of reading the requested ones."""
    if kind == "all_reduce":
        one_round = ranks == 2 or size <= shared.ONE_ROUND
        return AlgorithmCost(signals=1, copied=1.0 + ranks) if one_round else AlgorithmCost(signals=2, copied=3.0)
    return AlgorithmCost(signals=1, copied=1 + 1 / ranks if kind == "all_gather" else 2 - 1 / ranks)


def _two_level(on_each: int, hosts: int) -> dict[str, AlgorithmCost]:
    across = AlgorithmCost(hosts - 1, hosts - 1, (hosts - 1) / hosts / on_each)
    return {kind: _shared(kind, on_each, 0) + across for kind in ("reduce_scatter", "all_gather")}


# -----------------------------------------------------------------------------
# Measuring
# -----------------------------------------------------------------------------


def measure_group(team: AlgorithmGroup) -> MeasuredCosts:
    """Measure a group. Every rank takes part, and all ranks get the numbers of the slowest rank."""
    trials = {(key, size): run for size in _SIZES for key, run in _trials(team, size).items()}
    best = dict.fromkeys(trials, float("inf"))
    began = time.perf_counter()
    _time_all(trials, best)
    batch = max(team.exchange(time.perf_counter() - began))
    for _ in range(min(_MOST_BATCHES, int(_SECONDS / batch))):
        _time_all(trials, best)
    found = team.exchange(best)  # after this, all ranks have read everything
    if team.shared is not None:
        team.shared.give_back()
    slowest = {trial: max(times[trial] for times in found) for trial in trials}
    lines = {key: fitted(_SIZES, [slowest[key, size] for size in _SIZES]) for key, _ in trials}
    one, several, memory = lines.pop(("message", "")), lines.pop(("messages", "")), lines.pop(("memory", ""), None)
    further = max(0.0, several.alpha - one.alpha) / (_IN_A_ROUND - 1)
    return MeasuredCosts(
        one, further, memory and Line(memory.alpha, memory.beta / (1 + 1 / len(team.on_my_host))), lines
    )


def _time_all(trials: dict[Any, Callable[[], object]], best: dict[Any, float]) -> None:
    """Time each trial in turn, so that a disturbance affects only one time of each."""
    for trial, run in trials.items():
        run()  # touches the memory and synchronizes the ranks
        began = time.perf_counter()
        for _ in range(_BATCH):  # a single message may have arrived before it is waited for
            run()
        best[trial] = min(best[trial], (time.perf_counter() - began) / _BATCH)


def _trials(team: AlgorithmGroup, size: int) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the trials for `size` bytes, by algorithm and kind."""
    length = size // 4 // team.size
    whole, mine = torch.zeros(length * team.size), torch.zeros(length)
    bytes_ = whole.view(torch.uint8)
    trials: dict[tuple[str, str], Callable[[], object]] = {
        ("message", ""): partial(_shift, team, bytes_, 1),
        ("messages", ""): partial(_shift, team, bytes_, _IN_A_ROUND),
        ("backend", "all_reduce"): lambda: dist.all_reduce(whole, group=team.handle),
        ("backend", "all_gather"): lambda: dist.all_gather(_parts(team, mine), mine, group=team.handle),
        ("backend", "reduce_scatter"): lambda: ordered_sum(_exchanged(team, whole), torch.empty(length)),
        ("backend", "all_to_all"): lambda: _exchanged(team, whole),
    }
    memory = team.shared
    if memory is not None and team.has_hosts_alike:  # else some ranks would have more trials than others
        local = [torch.zeros(size // 4 // memory.size) for _ in range(memory.size)]
        trials["memory", ""] = lambda: team.run(shared.all_gather(memory, local[0], _parts(memory, local[0]))).wait()
        if team.is_on_one_host:
            chunks = whole.chunk(team.size)
            of_kind: dict[str, Callable[[], CollectiveSteps]] = {
                "all_reduce": lambda: shared.all_reduce(memory, whole, whole),
                "reduce_scatter": lambda: shared.reduce_scatter(memory, chunks, torch.empty(length)),
                "all_gather": lambda: shared.all_gather(memory, mine, _parts(team, mine)),
                "all_to_all": lambda: shared.all_to_all(memory, chunks, _parts(team, mine)),
            }
            for kind, start in of_kind.items():
                trials["shared", kind] = lambda start=start: team.run(start()).wait()  # type: ignore[misc]
    return trials


def _parts(ranks: Any, like: Tensor) -> list[Tensor]:
    return list(like.new_empty(ranks.size, *like.shape).unbind())


def _exchanged(team: AlgorithmGroup, whole: Tensor) -> list[Tensor]:
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=team.handle)
    return list(received.chunk(team.size))


def _shift(team: AlgorithmGroup, sent: Tensor, count: int) -> None:
    """Send to one neighbour and receive from the other, in `count` messages."""
    after, before = _neighbours(team)
    messages = team.messages()
    receiving = [messages.receive(part, before) for part in torch.empty_like(sent).chunk(count)]
    for message in [*receiving, *(messages.send(part, after) for part in sent.chunk(count))]:
        message.wait()


def _neighbours(team: AlgorithmGroup) -> tuple[int, int]:
    """Return the ranks to send to and receive from. With several hosts, they are on other hosts.

    The exception is a host with most of the ranks. In a ring of all ranks, sorted by host, the step is the number of
    ranks of the largest host.
    """
    ring = [rank for ranks in team.hosts for rank in ranks]
    step = 1 if team.is_on_one_host else max(map(len, team.hosts))
    place = ring.index(team.rank)
    return ring[(place + step) % team.size], ring[(place - step) % team.size]
