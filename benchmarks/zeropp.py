"""ZeRO++ against ZeRO-3 on two hosts of two ranks, which a slow link joins.

    python benchmarks/zeropp.py                   # prints the table
    python benchmarks/zeropp.py --write           # and puts it into docs/benchmarks.md, with docs/zeropp.png

A host is a network namespace of this machine with a name of its own, so ranks of two hosts have no memory in common. A
veth pair joins the two, and `tc tbf` bounds what each end sends. It takes Linux, root, and the commands ip, tc and
unshare. All steps train a GPT in the same processes and take turns, in the reverse order every second time. "Counted"
are the bytes that a host sends to the other one by `program.collectives()`; "interface" are those of the end of the
cable during a step, with the headers of TCP, IP and Ethernet, what ranks agree on, and acknowledgements.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import Ranks
from model import ADAMW, Config, batch, cross_entropy, make

import functional_parallel as fp
from sharding_specs import Mesh

CONFIG = Config("two hosts", 4, 256, time=32)
STEPS = {20: 6, 50: 40, 1000: 6}  # by Mbit/s
CABLE = "cable"
PICTURE = report.DOCUMENT.parent / "zeropp.png"


def plans() -> dict[str, Any]:
    precision = fp.mixed_precision("bf16", reduce="bf16")
    secondary = fp.chain(fp.zero(3, "local"), fp.zero(3, "node", keep_gathered=True))
    formats = partial(fp.compress, ("node", "local"), gather="int8", reduce="int4")
    return {
        "ZeRO-3": fp.chain(precision, fp.zero(3, "local"), fp.zero(3, "node")),
        "ZeRO++": fp.chain(precision, secondary, formats()),
        "ZeRO++, feedback": fp.chain(precision, secondary, formats(feedback=1.0)),
    }


class Contestant:
    """A training step, with what it sends and what it took."""

    def __init__(self, plan: Any, mesh: Mesh) -> None:
        model, params = fp.functional(make(CONFIG))

        def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model(params, tokens[:, :-1]), tokens)

        self.train = fp.train_step(loss, fp.optim.adamw(**ADAMW), mesh, plan)
        self.state = self.train.init(params, batch=batch(CONFIG, 0))
        self.found: dict[str, list[float]] = {"losses": [], "seconds": [], "interface": []}

    def step(self, index: int) -> None:
        dist.barrier()
        before, began = sent_by_host(), time.perf_counter()
        self.state, metrics = self.train(self.state, batch(CONFIG, index))
        loss = float(metrics.loss)
        dist.barrier()  # the step of the slowest rank
        took = time.perf_counter() - began
        for key, value in (("losses", loss), ("seconds", took), ("interface", sent_by_host() - before)):
            self.found[key].append(value)

    def counted(self, ranks_of_host: int) -> int:
        return ranks_of_host * sum(one.bytes for one in self.train.program.collectives() if "node" in one.axes)


def sent_by_host() -> int:
    return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())


def measured(settings: dict[str, Any]) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh(node=2, local=2)
    contestants = {name: Contestant(plan, mesh) for name, plan in plans().items()}
    order = list(contestants.values())
    for index in range(1 + settings["steps"]):  # the first step compiles
        for each in order if index % 2 else reversed(order):
            each.step(index)
    found = {name: {**each.found, "counted": each.counted(2)} for name, each in contestants.items()}
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def two_hosts(rate: int) -> Iterator[list[list[str]]]:
    """Make two hosts that a link of so many Mbit/s joins. Yield the command that runs something on either."""
    names = [f"fp{os.getpid()}{side}" for side in "ab"]

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*("ip", "-n", names[0], "link", "add", CABLE, "type", "veth"), *("peer", "name", CABLE, "netns", names[1]))
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", CABLE)
            for device in (CABLE, "lo"):
                run("ip", "-n", name, "link", "set", device, "up")
            bound = ("rate", f"{rate}mbit", "burst", "64kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *bound)
        named = 'hostname "$0" && exec "$@"'
        yield [["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, name] for name in names]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False)


def rows_of(rate: int, found: dict[str, Any], steps: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, each in found.items():
        seconds = each["seconds"][1:]
        first, third = report.spread(seconds)
        sent = [each["counted"], statistics.median(each["interface"][1:])]
        took = [f"{statistics.median(seconds):.2f}", f"{first:.2f} – {third:.2f}"]
        rows.append([rate, name, *(f"{value:,.0f}" for value in sent), *took, f"{each['losses'][steps]:.3f}"])
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for width, (name, each) in zip((5, 3, 1), found.items(), strict=True):
        ends = torch.tensor(each["seconds"][1:]).cumsum(0)
        for axis, x in zip(axes, (range(1, len(ends) + 1), ends), strict=True):
            axis.plot(x, each["losses"][1:], label=name, linewidth=width)
    axes[0].set(xlabel="step", ylabel="loss")
    axes[1].set(xlabel="seconds")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(STEPS), help="Mbit/s")
    parser.add_argument("--steps", type=int, help="of each, instead of 40 at 50 Mbit/s and 6 at other rates")
    parser.add_argument("--write", action="store_true", help="put the table and the picture into docs")
    args = parser.parse_args()
    rows, losses = [], None
    for rate in args.rates:
        steps = args.steps or STEPS.get(rate, 6)
        with two_hosts(rate) as hosts:
            prefixes = [prefix for prefix in hosts for _ in range(2)]
            there = {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": CABLE}
            found = Ranks(Path(__file__).name, {"steps": steps}, 4, there, prefixes=prefixes).found()
        if found is None:
            sys.exit(f"at {rate} Mbit/s a rank failed")
        rows += rows_of(rate, found, steps)
        losses = found if rate == 50 or losses is None else losses
    head = ("Mbit/s", "plan", "counted", "interface", "s", "spread", "last loss")
    text = report.table(head, rows)
    print(text)
    if args.write:
        report.write("zeropp", text)
        draw(losses, PICTURE)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        measured(json.loads(sys.argv[1]))
    else:
        main()
