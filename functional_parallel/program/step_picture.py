"""Picture of a step of one rank over time: its device, its host, and its links to the disk and to other ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..quantities import readable_bytes
from .price_item import Item

_LANES = ("disk → host", "host → device", "between ranks", "device", "device → host", "host", "host → disk")
_COLORS = {"forward": "#4c78a8", "backward": "#59a14f", "update": "#e8b339"}
_LAYER = re.compile(r"[a-zA-Z_]+[/.](\d+)")  # in the path of a parameter
_LETTERS, _BARS = 150, 500  # that fit into the width of the axes


def draw_step(path: str | Path, title: str, step: Sequence[Item], seconds: float) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = {lane: [item for item in step if item.lane == lane] for lane in _LANES}
    lanes = {lane: items for lane, items in found.items() if items}
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    figure = Figure(figsize=(11, 1.3 + 0.55 * len(lanes)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for row, items in enumerate(lanes.values()):
        for phase, color in _COLORS.items():
            bars = [(scale * item.start, scale * item.seconds) for item in items if item.phase == phase]
            edges = ["w" if width * _BARS > scale * seconds else color for _, width in bars]  # thin ones stay visible
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=color, edgecolors=edges, linewidth=0.5)
        for item in items:
            label = ", ".join(sorted({layer for each in item.parameters for layer in _LAYER.findall(each)}))
            if label and item.seconds * _LETTERS > seconds * len(label):
                middle = scale * (item.start + item.end) / 2
                axes.text(middle, row, label, ha="center", va="center", fontsize=7)
    title = f"{title}. Numbers are those of layers"
    axes.set(xlim=(0, scale * seconds), ylim=(len(lanes) - 0.5, -0.5), xlabel=unit, title=title)
    axes.set_yticks(range(len(lanes)), [f"{lane}\n{_amount(items)}" for lane, items in lanes.items()], fontsize=9)
    shares = [f"{sum(item.seconds for item in items) / seconds:.0%}" for items in lanes.values()]
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(lanes)), shares, fontsize=9)
    right.set_ylabel("busy")
    legend = [Patch(color=color, label=phase) for phase, color in _COLORS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path)


def _amount(items: list[Item]) -> str:
    moved = sum(item.sent if item.axes else item.moved for item in items if item.axes or item.is_move)
    return readable_bytes(moved) if moved else f"{len(items)} ops"
