"""The command that prints, draws and exports a schedule."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ScheduleError
from .actions import Schedule, rows
from .automatic import zb_auto
from .check import check
from .families import FAMILIES, family, for_ranks, get
from .simulate import Costs, Timeline, simulate
from .timeline import chrome_trace, plot, summary, timeline_text
from .torch_csv import to_csv


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional", nargs="?", metavar="name", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("--name", help="the same as the name")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--stages", type=int, help="stages of the model")
    size.add_argument("--ranks", type=int, help="number of ranks; the schedule determines the stages per rank")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches of a step")
    parser.add_argument("--chunks", type=int, default=2, help="stages per rank, for interleaved and looped-bfs")
    parser.add_argument(
        "--limit", type=int, help="microbatches that a rank may hold, for zb-auto; the ranks by default"
    )
    for option, kind in (("forward", "F"), ("input-grad", "I"), ("weight-grad", "W")):
        parser.add_argument(f"--{option}", type=float, default=1.0, help=f"time of {kind}")
    parser.add_argument("--latency", type=float, default=0.0, help="time of a message")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print an object with actions, times and peaks")
    form.add_argument("--csv", action="store_true", help="print the actions as PyTorch's pipelining reads them")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture; needs matplotlib")


def run(chosen: argparse.Namespace) -> str:
    costs = Costs(chosen.forward, chosen.input_grad, chosen.weight_grad, chosen.latency)
    schedule = check(_schedule(chosen, costs))
    timeline = simulate(schedule, costs)
    if chosen.trace:
        _write("--trace", chosen.trace, lambda path: path.write_text(chrome_trace(timeline)))
    if chosen.plot:
        _write("--plot", chosen.plot, lambda path: plot(timeline, path))
    if chosen.csv:
        return to_csv(schedule).rstrip()
    if chosen.json:
        return json.dumps(_numbers(timeline))
    return f"{schedule.title()}\n\n{timeline_text(timeline)}\n\n{summary(timeline)}"


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (OSError, ValueError, ImportError) as error:
        raise ScheduleError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from error


def _schedule(chosen: argparse.Namespace, costs: Costs) -> Schedule:
    name = chosen.name or chosen.positional
    if name is None:
        raise ScheduleError(f"no schedule is named; there are {', '.join(FAMILIES)}")
    if chosen.name and chosen.positional and chosen.name != chosen.positional:
        raise ScheduleError(f"{chosen.positional} and --name {chosen.name} are two schedules: name one")
    options: dict[str, Any] = {}
    if family(name).schedule is zb_auto:
        options = {"limit": chosen.limit, "costs": costs}
    elif chosen.limit is not None:
        raise ScheduleError(f"--limit applies to zb-auto only; the live microbatches of {name} are fixed: leave it out")
    if chosen.stages is None:
        return for_ranks(name, chosen.ranks, chosen.microbatches, chosen.chunks, **options)
    if family(name).chunks is None:
        options["chunks"] = chosen.chunks
    return get(name)(stages=chosen.stages, microbatches=chosen.microbatches, **options)


def _numbers(timeline: Timeline) -> dict[str, object]:
    return {
        "ranks": rows(timeline.schedule),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak": timeline.peaks,
    }
