"""Every pipeline schedule for the same numbers, side by side: what runs when, how long ranks wait, what they hold.

    python examples/pipeline_schedules.py --ranks 4 --microbatches 8 --chunks 2 --plot runs/schedules.png

The model is the same for all: what a rank has to do for a microbatch is a forward, the gradient of its input and that
of its weights, which take one unit of time each unless told otherwise. A schedule with several stages per rank cuts
that into as many parts. A message takes no time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import FAMILIES, Costs, Timeline


def main() -> None:
    args = arguments()
    names = args.only or list(FAMILIES)
    timelines = {name: timeline for name in names if (timeline := drawn(name, args)) is not None}

    for name, timeline in timelines.items():
        print(f"{name}\n{schedules.timeline_text(timeline)}\n")
    width = max(map(len, timelines))
    print(f"{'schedule':{width}}  makespan  bubble  of all time  span bubble  forwards held per rank")
    for name, timeline in sorted(timelines.items(), key=lambda item: item[1].makespan):
        held = " ".join(f"{peak:g}" for peak in timeline.peaks)
        share = f"{timeline.bubble_fraction:.1%}"
        times = f"{timeline.makespan:8g}  {timeline.bubble:6g}  {share:>11}  {timeline.span_bubble:11g}"
        print(f"{name:{width}}  {times}  {held}")
    if args.plot:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        schedules.plot(list(timelines.values()), args.plot)
        print(f"\npicture: {args.plot}")


def drawn(name: str, args: argparse.Namespace) -> Timeline | None:
    """The timeline of a schedule, if it is made for these numbers; else it says why not."""
    part = args.ranks / schedules.stages_for(name, args.ranks, args.chunks)  # of a rank's work, what is in one stage
    times = (part * args.forward, part * args.input_grad, part * args.weight_grad)
    costs = Costs(*times, latency=args.latency, activation=part)
    try:
        searched = {"costs": costs} if name == "zb-auto" else {}
        schedule = schedules.for_ranks(name, args.ranks, args.microbatches, args.chunks, **searched)
    except ScheduleError as error:
        print(f"left out: {error}\n")
        return None
    return schedules.simulate(schedule, costs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="stages per rank, where the schedule leaves that open")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a forward")
    parser.add_argument("--input-grad", type=float, default=1.0, help="time of the gradient of a stage's input")
    parser.add_argument("--weight-grad", type=float, default=1.0, help="time of the gradient of its weights")
    parser.add_argument("--latency", type=float, default=0.0, help="time of a message")
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=list(FAMILIES), help="these schedules alone")
    parser.add_argument("--plot", metavar="FILE", help="draw them all; needs matplotlib")
    return parser.parse_args()


if __name__ == "__main__":
    main()
