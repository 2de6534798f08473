"""Why everybody uses a ring: an all-reduce through one server against one around a ring, predicted and measured.

    python examples/ring_allreduce.py [--ranks 2 3 4] [--sizes 262144 1048576 4194304] [--gbit 1] [--out FILE]

φ bytes on each of p ranks are to be summed on all of them, over links of β bytes a second and α seconds a message.

    one server:  all send it everything, it sends everything to all:       2α + 2 (p − 1) φ / β, which grows with p
    ring:        p − 1 rounds sum the parts, p − 1 more hand them round:   2 (p − 1) α + 2 (p − 1) / p · φ / β < 2 φ / β

The script starts p gloo processes itself, measures α and β with single messages between two of them, and then times
both algorithms. Processes of one computer share its processors and its memory, and in all both algorithms move the same
2 (p − 1) φ bytes; what makes the ring fast is that on a network every rank has a card of its own. So each rank is given
one, which sends and receives `--gbit` a second at most (1 by default), and a message takes at least that long.
`--gbit 0` measures the computer as it is.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from functional_parallel.runtime.algorithms import ALGORITHMS, AlgorithmGroup
from functional_parallel.runtime.algorithms.model import Line, algorithm_cost, fitted
from functional_parallel.runtime.calls import CollectiveSteps

NAMES = {"naive": "one server", "ring": "ring"}
ROUNDS = 5
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)

Measured = dict[tuple[str, int, int], list[float]]  # by algorithm, ranks and bytes: seconds


# -----------------------------------------------------------------------------
# A network card for each rank
# -----------------------------------------------------------------------------


class Networked(AlgorithmGroup):
    """A team whose ranks send and receive so many bytes a second at most, each in both directions at once."""

    def __init__(self, handle: Any, rank: int, size: int, speed: float) -> None:
        super().__init__(handle, rank, list(range(size)))
        self.speed = speed

    def messages(self) -> Any:
        return Card(super().messages(), self.speed)


class Card:
    """Messages that pass one after the other in each direction."""

    def __init__(self, messages: Any, speed: float) -> None:
        self.messages, self.speed = messages, speed
        self.free = {"out": 0.0, "in": 0.0}

    def send(self, x: torch.Tensor, to: int) -> Passing:
        return Passing(self, "out", x.nbytes, self.messages.send(x, to))

    def receive(self, into: torch.Tensor, source: int) -> Passing:
        return Passing(self, "in", into.nbytes, self.messages.receive(into, source))


class Passing:
    """A message under way: it has passed when the card was free and has had the time for it."""

    def __init__(self, card: Card, direction: str, size: int, message: Any) -> None:
        self.card, self.direction, self.size, self.message = card, direction, size, message
        self.began = time.perf_counter()

    def wait(self) -> None:
        self.message.wait()
        if self.card.speed:
            free = self.card.free
            free[self.direction] = max(self.began, free[self.direction]) + self.size / self.card.speed
            time.sleep(max(0.0, free[self.direction] - time.perf_counter()))


# -----------------------------------------------------------------------------
# On each rank
# -----------------------------------------------------------------------------


def on_rank(rank: int, ranks: list[int], sizes: list[int], speed: float, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=max(ranks))
    times: Measured = {}
    link = None
    for count in sorted({2, *ranks}):
        group = dist.new_group(list(range(count)))
        if rank < count:
            team = Networked(group, rank, count, speed)
            link = link_of(team) if count == 2 else link
            if count in ranks:
                times.update({(name, count, size): timed(team, name, size) for size in sizes for name in NAMES})
        dist.barrier()
    if rank == 0:
        results.put((link, times))
    dist.barrier()
    dist.destroy_process_group()


def link_of(team: AlgorithmGroup) -> Line:
    """α and 1/β, from messages that two ranks send each other."""

    def swap(sent: torch.Tensor, received: torch.Tensor) -> CollectiveSteps:
        messages = team.messages()
        yield [messages.receive(received, 1 - team.rank), messages.send(sent, 1 - team.rank)]

    buffers = [(torch.zeros(size // 4), torch.zeros(size // 4)) for size in MESSAGES]
    return fitted(MESSAGES, [min(seconds(team, lambda pair=pair: swap(*pair))) for pair in buffers])


def timed(team: AlgorithmGroup, name: str, size: int) -> list[float]:
    """Seconds of the slowest rank for an all-reduce of ones, which is checked."""
    x, result = torch.ones(size // 4), torch.empty(size // 4)
    times = torch.tensor(seconds(team, lambda: ALGORITHMS[name].all_reduce(team, x, result, None)))
    assert (result == team.size).all()
    return torch.tensor(team.exchange(times.tolist())).amax(0).tolist()


def seconds(team: AlgorithmGroup, start: Callable[[], CollectiveSteps]) -> list[float]:
    times = []
    for _ in range(2 + ROUNDS):
        dist.barrier(team.handle)
        began = time.perf_counter()
        team.run(start()).wait()
        times.append(time.perf_counter() - began)
    return times[2:]


def measured(ranks: list[int], sizes: list[int], speed: float) -> tuple[Line, Measured]:
    """What the ranks measured; they are started here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(on_rank, (ranks, sizes, speed, port, results), nprocs=max(2, *ranks))
    return results.get()


# -----------------------------------------------------------------------------
# Predicted beside measured
# -----------------------------------------------------------------------------


def predicted(name: str, count: int, size: float, link: Line) -> float:
    work = algorithm_cost(name, "all_reduce", count)
    assert work is not None
    return work.rounds * link.alpha + work.sent * size * link.beta


def print_table(link: Line, times: Measured) -> None:
    print(f"a link: α = {1e6 * link.alpha:.0f} µs a message, β = {1e-6 / link.beta:.0f} MB/s\n")
    print("algorithm   ranks      φ, KiB  rounds   bytes at the busiest rank  predicted, ms   best, ms  median, ms")
    for (name, count, size), found in times.items():
        work = algorithm_cost(name, "all_reduce", count)
        print(
            f"{NAMES[name]:10}  {count:5}  {size / 1024:10.0f}  {work.rounds:6}  {work.sent:6.2f} φ = "
            f"{work.sent * size / 2**20:9.3f} MiB  {1000 * predicted(name, count, size, link):13.2f}  "
            f"{1000 * min(found):9.2f}  {1000 * statistics.median(found):10.2f}"
        )
    count, size = max(key[1] for key in times), max(key[2] for key in times)
    server, ring = (min(times[name, count, size]) for name in NAMES)
    theory = predicted("naive", count, size, link) / predicted("ring", count, size, link)
    print(
        f"\n{count} ranks, {size / 2**20:.4g} MiB: the ring is {server / ring:.1f} × as fast; predicted {theory:.1f} ×"
    )


def draw(link: Line, times: Measured, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("\n(no plot: matplotlib is not installed)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_ranks, over_sizes) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    draw_over_ranks(over_ranks, link, times)
    draw_over_sizes(over_sizes, link, times)
    figure.suptitle(
        f"All-reduce: lines are predicted; points are measured, the best of {ROUNDS}, with a bar up to the median",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"plot: {path}")


COLORS = {"naive": "tab:red", "ring": "tab:blue"}
FORMULAS = {"naive": "2α + 2(p − 1) φ/β", "ring": "2(p − 1)α + 2(p − 1)/p · φ/β"}


def draw_over_ranks(axes: Any, link: Line, times: Measured) -> None:
    size = max(key[2] for key in times)
    ranks = sorted({key[1] for key in times})
    line = range(2, 2 * max(ranks) + 1)
    for name, label in NAMES.items():
        label = f"{label}: {FORMULAS[name]}"
        axes.plot(line, [1000 * predicted(name, p, size, link) for p in line], color=COLORS[name], label=label)
        points(axes, ranks, [times[name, p, size] for p in ranks], COLORS[name])
    axes.axhline(2000 * size * link.beta, color="tab:blue", linestyle=":", linewidth=1, label="2 φ/β")
    axes.set(xlabel="ranks p", ylabel="ms", title=f"φ = {size / 2**20:.4g} MiB", xticks=list(line), ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def draw_over_sizes(axes: Any, link: Line, times: Measured) -> None:
    count = max(key[1] for key in times)
    sizes = sorted({key[2] for key in times})
    line = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)] if len(sizes) > 1 else sizes
    for name, label in NAMES.items():
        axes.plot(line, [1000 * predicted(name, count, n, link) for n in line], color=COLORS[name], label=label)
        points(axes, sizes, [times[name, count, n] for n in sizes], COLORS[name])
    axes.set(xscale="log", yscale="log", xlabel="φ", ylabel="ms", title=f"p = {count} ranks")
    axes.set_xticks(sizes, [f"{n >> 20} MiB" if n >= 1 << 20 else f"{n / 1024:.4g} KiB" for n in sizes])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def points(axes: Any, places: list[int], times: list[list[float]], color: str) -> None:
    """The best time, which is the network's; up to the median, which other programs on the machine add."""
    best = [1000 * min(found) for found in times]
    more = [1000 * statistics.median(found) - least for found, least in zip(times, best, strict=True)]
    axes.errorbar(places, best, [[0.0] * len(best), more], fmt="o", color=color, capsize=3, markersize=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks, each at least 2")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 18, 1 << 20, 1 << 22], help="bytes on each rank")
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of each rank's network card; 0: no limit")
    parser.add_argument("--out", type=Path, default=Path("runs/ring_allreduce.png"))
    options = parser.parse_args()
    if min(options.ranks) < 2 or min(options.sizes) < 4 or options.gbit < 0:
        parser.error("at least 2 ranks, 4 bytes and no negative speed")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_table(*(found := measured(options.ranks, options.sizes, options.gbit * 1e9 / 8)))
    draw(*found, options.out)
