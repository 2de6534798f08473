"""When actions of a pipeline really ran, against what the simulator says of the same schedule.

    python benchmarks/pipeline_timeline.py [--write]

Two gloo processes with one thread each train a GPT under each schedule and record every action. The simulator is given
each stage's own times of F, B, I and W in that step, and the time of a message of the size that crosses the cut, sent
back and forth. What is compared is what the executor does beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import launched
from makespan import costs_of
from model import SIZES, batch, make
from ours import Ours

from functional_parallel.ir import info
from functional_parallel.schedules import Timeline, simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
HEAD = ("schedule", "executed, ms", "simulated, ms", "executed ÷ simulated", "quartiles", "same order")


def measure(schedule: str, size: str, rounds: int) -> dict[str, Any]:
    """On one rank: the makespans of some steps, and that of the simulator with their actions' times."""
    config = SIZES[size]
    ours = Ours(make(config), "pipe", None, schedule)
    ours.gradients(batch(config, 0))
    ours.step(batch(config, 0))
    program = ours.train.program
    program.record()
    timelines = []
    for index in range(rounds + 2):
        dist.barrier()
        ours.step(batch(config, index))
        timelines.append(program.timeline())
    timelines = timelines[2:]
    in_order = all(_actions(each) == [list(row) for row in program.schedule.actions] for each in timelines)
    spans, latency = [each.makespan for each in timelines], message_time(program)
    simulated = [_simulated(each, latency) for each in timelines]
    ratios = [a / b for a, b in zip(spans, simulated, strict=True)]
    return {
        "schedule": schedule,
        "executed": statistics.median(spans),
        "simulated": statistics.median(simulated),
        "ratio": statistics.median(ratios),
        "quartiles": report.spread(ratios),
        "in_order": in_order,
    }


def _simulated(timeline: Timeline, latency: float) -> float:
    events = [event for row in timeline.events for event in row]
    return simulate(timeline.schedule, costs_of(timeline.schedule, events, latency)).makespan


def _actions(timeline: Timeline) -> list[list[Any]]:
    return [[event.action for event in sorted(row, key=lambda event: event.start)] for row in timeline.events]


def message_time(program: Any) -> float:
    """Half a round trip of what crosses the cut."""
    buffer = torch.zeros(sum(info(node).aval.nbytes for node in program.stages[0].sends_forward), dtype=torch.uint8)
    times = []
    for _ in range(40):
        began = time.perf_counter()
        for sender in (0, 1):
            if dist.get_rank() == sender:
                dist.send(buffer, 1 - sender)
            else:
                dist.recv(buffer, sender)
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)


def worker(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [measure(schedule, settings["size"], settings["rounds"]) for schedule in SCHEDULES]
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    rows = launched(Path(__file__).name, {"size": args.size, "rounds": args.rounds}, 2)
    if rows is None:
        raise SystemExit("a rank failed")
    table = report.table(HEAD, [_cells(row) for row in rows])
    print(table)
    if args.write:
        report.write("timeline", table)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["quartiles"]
    times = (f"{1000 * row['executed']:.1f}", f"{1000 * row['simulated']:.1f}", f"{row['ratio']:.2f}")
    return (row["schedule"], *times, f"{low:.2f} – {high:.2f}", "yes" if row["in_order"] else "NO")


if __name__ == "__main__":
    worker(json.loads(sys.argv[1])) if "RANK" in os.environ else main()
