"""Views of a timeline: text, Chrome trace and image."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .actions import ACTION_KINDS
from .simulate import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_TIME = {False: "time", True: "time (paler: the later stages of a rank)"}
_LETTERS = 130  # that fit into the width of an image
_WIDTH = 900.0  # of the widest axes, in points
_EDGE = 0.1  # maximum width of the white edge, relative to the width of the bar
_COLORS = {"F": "#4c78a8", "B": "#59a14f", "I": "#76b7b2", "W": "#edc948"}
_DARK = "FB"  # kinds with dark colors: their text is white


def timeline_text(timeline: Timeline, unit: float | None = None) -> str:
    """Format a timeline as text, with one row per rank and one column per unit of time.

    A cell shows the action that starts there, dashes while it runs, and a dot if the rank waits.

    >>> from functional_parallel import schedules
    >>> print(schedules.timeline_text(schedules.simulate(schedules.gpipe(2, 2))))
    rank 0  F0  F1  .   .   .   B0  --  B1  --
    rank 1  .   F0  F1  B0  --  B1  --  .   .

    Args:
        timeline: a timeline, as returned by `simulate`.
        unit: time per column. The default is the longest unit that shows every action exactly, but at least 1/200 of
            the makespan.

    Returns:
        The text. Actions include their stage only if there are more stages than ranks.
    """
    first = min(event.start for row in timeline.events for event in row)
    unit = unit or _unit(timeline, first)
    named = timeline.schedule.stages > timeline.schedule.ranks
    columns = round(timeline.makespan / unit)
    lines, digits = [], len(str(timeline.schedule.ranks - 1))
    labels = {
        event: str(event.action) if named else f"{event.action.kind}{event.action.microbatch}"
        for row in timeline.events
        for event in row
    }
    width = max(map(len, labels.values()))
    for rank, row in enumerate(timeline.events):
        cells = ["."] * columns
        for event in row:
            start, end = (round((time - first) / unit) for time in (event.start, event.end))
            cells[start:end] = [labels[event], *["-" * width] * (end - start - 1)][: end - start]
        lines.append(f"rank {rank:{digits}}  {'  '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines)


def _unit(timeline: Timeline, first: float) -> float:
    times = [Fraction(time - first) for row in timeline.events for event in row for time in event[2:]]
    scale = math.lcm(*(time.denominator for time in times))
    common = Fraction(math.gcd(*(int(time * scale) for time in times)), scale)
    return max(float(common), timeline.makespan / 200) or 1.0  # any positive unit if no action takes time


def summary(timeline: Timeline) -> str:
    """Format makespan, bubbles and peaks, one per line.

    >>> from functional_parallel import schedules
    >>> print(schedules.summary(schedules.simulate(schedules.gpipe(2, 2))))
    makespan     9
    bubble       3, 33.3 % of all ranks' time
    span bubble  3
    peak         2 2

    Args:
        timeline: a timeline, as returned by `simulate`.

    Returns:
        The text. Peaks have the unit of `Costs.activation`: by default, the activations of one microbatch and
        stage.
    """
    return "\n".join(
        (
            f"makespan     {timeline.makespan:g}",
            f"bubble       {timeline.bubble:g}, {timeline.bubble_fraction:.1%} of all ranks' time".replace("%", " %"),
            f"span bubble  {timeline.span_bubble:g}",
            f"peak         {' '.join(f'{peak:g}' for peak in timeline.peaks)}",
        )
    )


def chrome_trace(timeline: Timeline, microseconds: float = 1.0) -> str:
    """Convert a timeline to JSON for chrome://tracing or Perfetto, with one process per rank and one thread per stage.

    >>> import json
    >>> from functional_parallel import schedules
    >>> trace = json.loads(schedules.chrome_trace(schedules.simulate(schedules.gpipe(2, 1))))
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0B0', '1F0', '1B0']

    Args:
        timeline: a timeline, as returned by `simulate` or `program.timeline()`.
        microseconds: microseconds per unit of time; 1e6 for `program.timeline()`, which is in seconds.

    Returns:
        The content of the file.
    """
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.schedule.ranks)
    ]
    events = [_traced(event, microseconds) for row in timeline.events for event in row]
    return json.dumps({"traceEvents": names + events})


def _traced(event: Event, microseconds: float) -> dict[str, Any]:
    rank, action, start, end = event
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind,
        "pid": rank,
        "tid": action.stage,
        "ts": start * microseconds,
        "dur": (end - start) * microseconds,
        "args": {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch},
    }


def plot(timeline: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Draw a timeline, or several on one time scale, with matplotlib.

    If a timeline is more than twice as long as the median of several, it is cut off at the edge of the image.

    Args:
        timeline: one timeline or several, as returned by `simulate` or recorded by a pipeline.
        path: path of the image. Its suffix determines the format.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    columns = 1 if len(timelines) == 1 else 2
    lines = -(-len(timelines) // columns)
    usual = 2 * sorted(each.makespan for each in timelines)[len(timelines) // 2]
    until = max(each.makespan for each in timelines if each.makespan <= usual) or 1.0
    ranks = max(each.schedule.ranks for each in timelines)
    figure = Figure(figsize=(14 if columns == 1 else 18, lines * (1.2 + 0.5 * ranks)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True).flat
    for axes, each in itertools.zip_longest(grid, timelines):
        if each is None:
            axes.set_axis_off()
        else:
            _draw(axes, each, until)
    there = {event.action.kind for each in timelines for row in each.events for event in row}
    legend = [Patch(color=_COLORS[kind], label=text) for kind, text in ACTION_KINDS.items() if kind in there]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _draw(axes: Axes, timeline: Timeline, until: float) -> None:
    schedule, events = timeline.schedule, [event for row in timeline.events for event in row]
    named = schedule.stages > schedule.ranks
    together = {(event.rank, event.start) for event in events if event.action in schedule.pairs} & {
        (event.rank, event.start) for event in events if event.action.kind in "BI"
    }
    bars: dict[Any, list[tuple[float, float]]] = {}
    for rank, action, start, end in events:
        # Two actions that overlap share the height of the row.
        half = (rank, start) in together
        low, height = (rank - 0.42 + 0.42 * (half and action.kind != "F"), 0.42 if half else 0.84)
        shade = 1 - 0.5 * (action.stage // schedule.ranks) / max(1, schedule.stages / schedule.ranks - 1)
        bars.setdefault((low, height, action.kind, shade), []).append((start, end - start))
        if (end - start) * _LETTERS > until * len(str(action.microbatch)) and end <= until:
            ink = "w" if action.kind in _DARK and shade > 0.75 else "k"
            text = str(action.microbatch)
            axes.text((start + end) / 2, low + height / 2, text, ha="center", va="center", fontsize=7, color=ink)
    for (low, height, kind, shade), spans in bars.items():
        edges = [min(1.0, _EDGE * _WIDTH * width / until) for _, width in spans]  # white edges, thinner than the bar
        colors = {"facecolors": _COLORS[kind], "alpha": shade, "edgecolor": "w"}
        axes.broken_barh(spans, (low, height), **colors, linewidth=edges)
    axes.set(
        xlim=(-0.01 * until, 1.01 * until),
        ylim=(schedule.ranks - 0.5, -0.5),
        xlabel=_TIME[named],
        yticks=range(schedule.ranks),
    )
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)])
    peak = max(timeline.peaks)
    runs_on = f", until {timeline.makespan:g}" if timeline.makespan > until else ""
    axes.set_title(f"{schedule.title()}: bubble {timeline.bubble_fraction:.1%}, peak {peak:g}{runs_on}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
