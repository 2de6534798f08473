"""Why everybody uses a ring: an all-reduce in three ways, with the bytes and the time of every rank beside theory.

    python examples/ring_allreduce.py [--ranks 2 3 4] [--sizes 262144 1048576 4194304] [--gbit 1] [--plot FILE]

φ bytes on each of p ranks are to be summed on all of them, over links of β bytes a second and α seconds a message.

    one server:  all send it everything, it sends everything to all:    2α + 2 (p − 1) φ / β, which grows with p
    ring:        p − 1 rounds sum the parts, p − 1 hand them round:     2 (p − 1) α + 2 (p − 1) / p · φ / β < 2 φ / β
    halving:     partners swap halves, then quarters, …, and back:      2 log₂ p · α + 2 (p − 1) / p · φ / β, if p = 2ᵏ

The script starts p gloo processes itself, measures α and β with messages between two of them, and then times all three.
Processes of one computer share its processors and its memory, and in all every way moves the same 2 (p − 1) φ bytes;
what makes the ring fast is that on a network every rank has a card of its own. So each rank is given one, which sends
and receives `--gbit` a second at most (1 by default), and a message takes at least that long. `--gbit 0` measures the
computer as it is.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

REPEATS = 5
SMALL, LARGE = 1 << 12, 1 << 22  # bytes of the messages that measure the link


# -----------------------------------------------------------------------------
# A network card for each rank
# -----------------------------------------------------------------------------


class Card:
    """Messages of one rank, at most `speed` bytes a second in each direction; 0 is no limit.

    Attributes:
        moved: bytes so far; of those sent and received at the same time, the larger number.
    """

    def __init__(self, group: Any, rank: int, size: int, speed: float) -> None:
        self.group, self.rank, self.size, self.speed = group, rank, size, speed
        self.moved = 0

    def exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> None:
        """Send and receive at the same time, by rank. Return when all of it has passed."""
        began = time.perf_counter()
        works = [dist.irecv(x, group=self.group, group_src=rank) for rank, x in receive.items()]
        works += [dist.isend(x, group=self.group, group_dst=rank) for rank, x in send.items()]
        for work in works:
            work.wait()
        size = max(sum(x.nbytes for x in messages.values()) for messages in (send, receive))
        self.moved += size
        if self.speed:
            time.sleep(max(0.0, began + size / self.speed - time.perf_counter()))


# -----------------------------------------------------------------------------
# Three ways to sum x in place
# -----------------------------------------------------------------------------


def one_server(card: Card, x: Tensor) -> None:
    if card.rank != 0:
        card.exchange({0: x}, {})
        card.exchange({}, {0: x})
        return
    received = {rank: torch.empty_like(x) for rank in range(1, card.size)}
    card.exchange({}, received)
    for each in received.values():
        x += each
    card.exchange(dict.fromkeys(received, x), {})


def ring(card: Card, x: Tensor) -> None:
    parts, rank, size = x.tensor_split(card.size), card.rank, card.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):  # the sum of part i starts on rank i and is complete on the rank before it
        mine = parts[(rank - step - 1) % size]
        arriving = torch.empty_like(mine)
        card.exchange({after: parts[(rank - step) % size]}, {before: arriving})
        mine += arriving
    for step in range(size - 1):
        card.exchange({after: parts[(rank - step + 1) % size]}, {before: parts[(rank - step) % size]})


def halving(card: Card, x: Tensor) -> None:
    rounds = []
    distance = card.size // 2
    while distance:
        low, high = x.tensor_split(2)
        kept, given = (high, low) if card.rank & distance else (low, high)
        partner, arriving = card.rank ^ distance, torch.empty_like(kept)
        card.exchange({partner: given}, {partner: arriving})
        kept += arriving
        rounds.append((partner, kept, given))
        x, distance = kept, distance // 2
    for partner, kept, given in reversed(rounds):
        card.exchange({partner: kept}, {partner: given})


class Way(NamedTuple):
    all_reduce: Callable[[Card, Tensor], None]
    rounds: Callable[[int], float]  # of p ranks
    moved: Callable[[int], float]  # by the busiest rank, in units of φ
    formula: str
    color: str


WAYS = {
    "one server": Way(one_server, lambda p: 2, lambda p: 2 * (p - 1), "2α + 2(p − 1) φ/β", "tab:red"),
    "ring": Way(ring, lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, "2(p − 1)α + 2(p − 1)/p · φ/β", "tab:blue"),
    "halving": Way(
        halving, lambda p: 2 * log2(p), lambda p: 2 * (p - 1) / p, "2 log₂ p · α + 2(p − 1)/p · φ/β", "tab:green"
    ),
}


# -----------------------------------------------------------------------------
# On each rank
# -----------------------------------------------------------------------------


class Link(NamedTuple):
    alpha: float  # seconds a message
    beta: float  # bytes a second


class Run(NamedTuple):
    name: str
    ranks: int
    size: int  # φ
    moved: list[int]  # bytes, by rank
    seconds: list[float]  # the best, by rank


def on_rank(rank: int, ranks: list[int], sizes: list[int], speed: float, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=max(2, *ranks))
    runs, link = [], None
    for count in sorted({2, *ranks}):
        group = dist.new_group(list(range(count)))
        if rank < count:
            card = Card(group, rank, count, speed)
            link = link_of(card) if count == 2 else link
            names = [name for name in WAYS if name != "halving" or count & (count - 1) == 0]
            runs += [run(name, card, size) for size in sizes for name in names if count in ranks]
        dist.barrier()
    if rank == 0:
        results.put((link, runs))
    dist.barrier()
    dist.destroy_process_group()


def link_of(card: Card) -> Link:
    """Measure α and β with messages that two ranks send each other."""
    other, times = 1 - card.rank, []
    for size in (SMALL, LARGE):
        sent, received = torch.zeros(2, size // 4)
        times.append(best(card, lambda pair=(sent, received): card.exchange({other: pair[0]}, {other: pair[1]})))
    beta = (LARGE - SMALL) / max(times[1] - times[0], 1e-9)
    return Link(max(0.0, times[0] - SMALL / beta), beta)


def run(name: str, card: Card, size: int) -> Run:
    """Check an all-reduce of integers against torch's own, count its bytes and time it."""
    x = torch.randint(100, (size // 4,)).float()
    wanted = x.clone()
    dist.all_reduce(wanted, group=card.group)
    card.moved = 0
    WAYS[name].all_reduce(card, x)
    assert torch.equal(x, wanted), name
    mine = (card.moved, best(card, lambda: WAYS[name].all_reduce(card, torch.ones(size // 4))))
    every = [mine] * card.size
    dist.all_gather_object(every, mine, group=card.group)
    return Run(name, card.size, size, [moved for moved, _ in every], [seconds for _, seconds in every])


def best(card: Card, call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier(card.group)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def measured(ranks: list[int], sizes: list[int], speed: float) -> tuple[Link, list[Run]]:
    """Start the ranks, and return what they measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("fork").SimpleQueue()
    arguments = (ranks, sizes, speed, port, results)
    multiprocessing.start_processes(on_rank, arguments, nprocs=max(2, *ranks), start_method="fork")
    return results.get()


# -----------------------------------------------------------------------------
# Predicted beside measured
# -----------------------------------------------------------------------------


def predicted(name: str, ranks: int, size: float, link: Link) -> float:
    return WAYS[name].rounds(ranks) * link.alpha + WAYS[name].moved(ranks) * size / link.beta


def print_table(link: Link, runs: list[Run]) -> None:
    print(f"a link: α = {1e6 * link.alpha:.0f} µs a message, β = {1e-6 * link.beta:.0f} MB/s\n")
    print("way         ranks    φ, KiB  rounds   busiest  predicted, ms   ms by rank; MiB through its card")
    for name, ranks, size, moved, seconds in runs:
        way = WAYS[name]
        times = " ".join(f"{1000 * each:.2f}" for each in seconds)
        mebibytes = " ".join(f"{each / 2**20:.3f}" for each in moved)
        print(
            f"{name:10}  {ranks:5}  {size / 1024:8.0f}  {way.rounds(ranks):6.0f}  {way.moved(ranks):6.2f} φ  "
            f"{1000 * predicted(name, ranks, size, link):13.2f}   {times};  {mebibytes}"
        )
    count, size = max(each.ranks for each in runs), max(each.size for each in runs)
    server, by_ring = (
        max(each.seconds) for each in runs if each[1:3] == (count, size) and each.name in ("one server", "ring")
    )
    theory = predicted("one server", count, size, link) / predicted("ring", count, size, link)
    speedup = f"{server / by_ring:.1f} × as fast; predicted {theory:.1f} ×"
    print(f"\n{count} ranks, {size / 2**20:.4g} MiB: the ring is {speedup}")


def draw(link: Link, runs: list[Run], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("\n(no plot: matplotlib is not installed)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    count, size = max(each.ranks for each in runs), max(each.size for each in runs)
    figure, (over_ranks, over_sizes) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name, way in WAYS.items():
        mine = [each for each in runs if each.name == name]
        some = [each for each in mine if each.size == size]
        every = [p for p in range(2, 2 * count + 1) if name != "halving" or p & (p - 1) == 0]
        over_ranks.plot(
            every,
            [1000 * predicted(name, p, size, link) for p in every],
            color=way.color,
            label=f"{name}: {way.formula}",
        )
        over_ranks.plot(
            [each.ranks for each in some], [1000 * max(each.seconds) for each in some], "o", color=way.color
        )
        some = [each for each in mine if each.ranks == count]
        sizes = [each.size for each in some]
        over_sizes.plot(sizes, [1000 * predicted(name, count, n, link) for n in sizes], color=way.color)
        over_sizes.plot(sizes, [1000 * max(each.seconds) for each in some], "o", color=way.color)
    over_ranks.axhline(2000 * size / link.beta, color="tab:blue", linestyle=":", linewidth=1, label="2 φ/β")
    over_ranks.set(xlabel="ranks p", ylabel="ms", title=f"φ = {size / 2**20:.4g} MiB", ylim=(0, None))
    over_ranks.legend(frameon=False, fontsize=9)
    over_sizes.set(xscale="log", yscale="log", xlabel="φ", ylabel="ms", title=f"p = {count} ranks")
    over_sizes.set_xticks(sizes, [f"{n / 1024:.4g} KiB" for n in sizes])
    over_sizes.minorticks_off()
    figure.suptitle(
        f"All-reduce: lines are predicted; points are the best of {REPEATS}, on the slowest rank", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"plot: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks, each at least 2")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 18, 1 << 20, 1 << 22], help="bytes on each rank")
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of each rank's network card; 0: no limit")
    parser.add_argument("--plot", type=Path, help="write a plot of predicted and measured times")
    options = parser.parse_args()
    if min(options.ranks) < 2 or min(options.sizes) < 4 or options.gbit < 0:
        parser.error("at least 2 ranks, 4 bytes and no negative speed")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_table(*(found := measured(options.ranks, options.sizes, options.gbit * 1e9 / 8)))
    if options.plot is not None:
        draw(*found, options.plot)
