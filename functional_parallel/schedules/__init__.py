"""Pipeline schedules as data. A rule builds a schedule, a checker verifies it, and a simulator computes its timeline.

Schedules can also be drawn and searched. This package does not import torch: a schedule is lists of numbers.
"""

import warnings
from typing import Any

from . import command
from .actions import Action, Schedule, Versions, count, rows
from .automatic import zb_auto
from .check import check, kept_versions, peaks
from .dualpipe import dualpipe, dualpipe_v
from .families import FAMILIES, Family, for_ranks, get, stages_for
from .interleaved import breadth_first, interleaved
from .messages import Receive, Send, check_messages, messages
from .one_stage import eager_one_f_one_b, gpipe, naive, one_f_one_b
from .pipedream import pipedream, two_bw
from .predecessors import receiving_stage, replay
from .search import Layer, Machine, ScheduleChoice, balanced_cut, check_search, search
from .simulate import Costs, Event, Timeline, simulate
from .timeline import chrome_trace, plot, summary, timeline_text
from .torch_csv import from_csv, to_csv
from .v_shape import v_half, v_min
from .zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "FAMILIES",
    "Action",
    "Costs",
    "Event",
    "Family",
    "Layer",
    "Machine",
    "Receive",
    "Schedule",
    "ScheduleChoice",
    "Send",
    "Timeline",
    "Versions",
    "balanced_cut",
    "breadth_first",
    "check",
    "check_messages",
    "chrome_trace",
    "dualpipe",
    "dualpipe_v",
    "eager_one_f_one_b",
    "for_ranks",
    "from_csv",
    "get",
    "gpipe",
    "interleaved",
    "kept_versions",
    "messages",
    "naive",
    "one_f_one_b",
    "peaks",
    "pipedream",
    "plot",
    "rows",
    "search",
    "simulate",
    "stages_for",
    "summary",
    "timeline_text",
    "to_csv",
    "two_bw",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


def __getattr__(name: str) -> Any:
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("fp.schedules.Plan was renamed: write fp.schedules.ScheduleChoice", DeprecationWarning, stacklevel=2)
    return ScheduleChoice
