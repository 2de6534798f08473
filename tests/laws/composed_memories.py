"""Transforms that change where values are, or how they are sent, and what becomes of each pair of them.

`python -m tests.laws.composed_memories` writes the table of pairs into docs/memory_tiers.md.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import functional_parallel as fp
from functional_parallel.errors import OrderError
from sharding_specs import Mesh

from ..passes.networks import SPLIT
from ..written import with_part

__all__ = [
    "CHECKPOINT",
    "FEATURES",
    "PAGE",
    "REFUSALS",
    "ROUNDED",
    "Chosen",
    "Refusal",
    "completed",
    "covering",
    "is_accepted",
    "mesh_of",
    "pairs",
    "plan_of",
    "with_table",
]

PAGE = Path(__file__).parent.parent.parent / "docs" / "memory_tiers.md"
BEGIN, END = "<!-- pairs: written by python -m tests.laws.composed_memories -->", "<!-- end of pairs -->"

Chosen = Mapping[str, str]  # a variant of each feature that a plan has

_DISK: dict[str, Any] = {"path": tempfile.gettempdir(), "group": 600}
_PIPELINE = partial(fp.pipeline, "pipe", microbatches=2)

FEATURES: dict[str, dict[str, Any]] = {  # by variant, transforms, or functions of the data axes and a budget
    "offload": {
        "state": [fp.offload(state="host")],
        "half of the state": [fp.offload(state="host", fraction=0.5)],
        "state and parameters": [fp.offload(state="host", parameters="host")],
        "on disk": [fp.offload(state="disk", parameters="disk", **_DISK)],
        "activations": [fp.offload(activations="host", at_least=1)],
        "everything": [fp.offload(state="disk", parameters="host", activations="host", at_least=1, **_DISK)],
    },
    "compress": {
        "identity": [lambda axes, _: fp.compress(axes, gather="identity", reduce="identity")],
        "int8, int4": [lambda axes, _: fp.compress(axes)],
        "sums": [lambda axes, _: fp.compress(axes, gather=None, reduce="int8")],
    },
    "partition_activations": {
        "device": [fp.partition_activations("tensor", at_least=1)],
        "host": [fp.partition_activations("tensor", memory="host", at_least=1)],
    },
    "pipeline": {
        "gpipe": [_PIPELINE(schedule="gpipe")],
        "1f1b": [_PIPELINE(schedule="1f1b")],
        "zb-h1": [_PIPELINE(schedule="zb-h1")],
        "interleaved": [_PIPELINE(schedule="interleaved", chunks=2)],
    },
    "accumulate": {"once": [fp.accumulate(2)], "each": [fp.accumulate(2, reduce="each")]},
    "remat": {"all": [fp.remat()], "budget": [lambda _, budget: fp.remat(budget=budget)]},
    "mixed_precision": {
        "bf16": [fp.mixed_precision("bf16")],
        "fp16": [fp.mixed_precision("fp16", loss_scale=fp.LossScale(2.0**8))],
    },
    "tensor_parallel": {"by specs": [fp.tensor_parallel("tensor", SPLIT)]},
    "zero": {
        **{f"stage {stage}": [fp.zero(stage, "data")] for stage in range(4)},
        "flat": [fp.zero(2, "data", layout="flat")],
        "secondary": [fp.zero(3, "data"), fp.zero(3, "node", keep_gathered=True)],
    },
}
CHECKPOINT = "checkpoints"


class Refusal(NamedTuple):
    """A combination that is refused. A part of a combination is a feature with its variants, or with all."""

    combination: Mapping[str, tuple[str, ...]]
    error: type[Exception]
    message: str  # a regular expression
    reason: str
    without: tuple[str, ...] = ()  # features with which it is accepted

    def holds(self, chosen: Chosen) -> bool:
        return not set(self.without).intersection(chosen) and all(
            chosen.get(feature) in (variants or FEATURES[feature]) for feature, variants in self.combination.items()
        )


REFUSALS = [
    Refusal(
        {"pipeline": (), "accumulate": ()},
        OrderError,
        r"sums the gradients of its microbatches itself: leave accumulate",
        "a pipeline sums over its own microbatches: give it more of them",
    ),
    Refusal(
        {"compress": ("int8, int4",), "zero": ("stage 1", "stage 2", "flat")},
        ValueError,
        r"without masters the error of 'int8' would stay in them",
        "stages 1 and 2 gather new parameters: without masters, by `fp.mixed_precision`, the error would stay in them",
        without=("mixed_precision",),
    ),
    Refusal(
        {"offload": ("half of the state",), "zero": ("flat",)},
        ValueError,
        r"a flat layout has one vector of state, of which no share moves",
        "a flat layout has one vector of state, of which `fraction=` moves no share",
    ),
    Refusal(
        {"pipeline": (), "zero": ("flat",)},
        ValueError,
        r"a pipeline's ranks hold those of their own stages",
        "a flat layout has the parameters of all stages in one vector",
    ),
]
ROUNDED = Refusal(  # accepted, and goes on from a checkpoint, but not to the bit
    {"compress": ("int8, int4",), "zero": ("stage 1", "stage 2", "flat"), "mixed_precision": ()},
    AssertionError,
    "",
    "at stages 1 and 2 with `gather='int8'`, a restored run computes its first step with the rounded masters, and not "
    "with the parameters that were sent",
)


def pairs() -> Iterator[Chosen]:
    """Every variant alone, and every two of different features."""
    for feature, variants in FEATURES.items():
        yield from ({feature: variant} for variant in variants)
    for a, b in itertools.combinations(FEATURES, 2):
        yield from ({a: x, b: y} for x, y in itertools.product(FEATURES[a], FEATURES[b]))


def is_accepted(chosen: Chosen) -> bool:
    return not any(each.holds(completed(chosen)) for each in REFUSALS)


def completed(chosen: Chosen) -> Chosen:
    """Add what others need: an axis of tensor parallelism, and ZeRO."""
    zero = {"zero": "stage 3" if "compress" in chosen else "stage 2"}
    split = {"tensor_parallel": "by specs"} if "partition_activations" in chosen else {}
    return {**zero, **split, **chosen}


def two(chosen: Chosen) -> set[tuple[Any, Any]]:
    return set(itertools.combinations(sorted(chosen.items()), 2))


def covering() -> list[Chosen]:
    """Plans of many features. Every two variants that are not refused are in one of them.

    Every two features are in the first two, one with a pipeline and one that accumulates.
    """
    draw = random.Random(0)
    left = set().union(*(two(chosen) for chosen in pairs() if is_accepted(chosen)))
    rows = []
    while left:
        base = dict(min(left))
        found = max((_grown(base, draw) for _ in range(40)), key=lambda chosen: len(left & two(chosen)))
        rows.append(found)
        left -= two(found)
    first = [next(row for row in rows if feature in row) for feature in ("pipeline", "accumulate")]
    return [*first, *(row for row in rows if row not in first)]


def _grown(chosen: Chosen, draw: random.Random) -> Chosen:
    """Add a variant of each other feature that may be added."""
    for feature in draw.sample(list(FEATURES), len(FEATURES)):
        more = {**chosen, feature: draw.choice(list(FEATURES[feature]))}
        chosen = more if feature not in chosen and is_accepted(more) else chosen
    return chosen


def mesh_of(chosen: Chosen) -> Mesh:
    sizes = {"pipe": 2} if "pipeline" in chosen else {}
    sizes |= {"node": 2} if chosen.get("zero") == "secondary" else {}
    return Mesh({**sizes, "data": 2, **({"tensor": 2} if "tensor_parallel" in chosen else {})})


def plan_of(chosen: Chosen, budget: int | None = None) -> fp.Plan:
    axes = ("node", "data") if chosen["zero"] == "secondary" else "data"
    found = [each for feature, variant in chosen.items() for each in FEATURES[feature][variant]]
    made = [each(axes, budget) if isinstance(each, FunctionType) else each for each in found]
    return fp.chain(*sorted(made, key=lambda each: each.order))


def table() -> str:
    """Return rows of all features, and the reasons below."""
    names = [*FEATURES, CHECKPOINT]
    reasons: list[str] = []

    def cell(a: str, b: str) -> str:
        rules = [ROUNDED] if (a, b) == ("compress", CHECKPOINT) else []
        rules += [each for each in REFUSALS if {a, b} <= {*each.combination}]
        reasons.extend(each.reason for each in rules if each.reason not in reasons)
        notes = "".join(f" [{reasons.index(each.reason) + 1}]" for each in rules)
        return ("refused" if any(not any(each.combination.values()) for each in rules) else "yes") + notes

    lines = ["| | " + " | ".join(names[1:]) + " |", "|---|" + "---|" * (len(names) - 1)]
    for row, a in enumerate(names[:-1]):
        cells = ["" if column < row else cell(a, b) for column, b in enumerate(names[1:])]
        lines.append(f"| {a} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))])


def with_table(text: str) -> str:
    return with_part(text, BEGIN, f"\n\n{table()}\n\n", END)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
