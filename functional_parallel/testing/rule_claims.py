"""Claims that a sharding rule makes about its op, each with operand layouts that test it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sharding_specs import P
from sharding_specs.blocks import Blocks, units

from ..collectives import DimSplit
from ..ir import Aval
from ..rules import REPLICATED, OperandInfo, RuleText, Shard, SplitFactor, factor_sizes, placed

SUMS = "partial sums"

Layouts = tuple[Shard | str | None, ...]

_PROMISES = {
    "": "the op computes each slice along it separately",
    "+": "results that lack it are the sums of the results of its slices",
    ">": "results that lack it are the maxima of the results of its slices",
    "<": "results that lack it are the minima of the results of its slices",
    "?": "the rule's local function looks up the rank's slice and returns zeros for all others",
    "!": "the rule's local function combines the ranks",
}
_FIXES = {
    "": "Mark the factor: ^ if the op needs it replicated, + if the results of slices add up",
    "?": "Correct the local function",
    "!": "Correct the local function",
}


@dataclass(frozen=True)
class Case:
    claim: str
    promise: str  # consequence of the claim that the rule relies on
    fix: str  # advice for a false claim
    layouts: Layouts  # for each operand a shard, SUMS, or None for a replicated operand
    factor: str = ""  # that the case splits; empty if it splits none
    is_mark: bool = False  # whether it tests a mark of linear operands

    def __str__(self) -> str:
        laid_out = [(index, layout) for index, layout in enumerate(self.layouts) if layout is not None]
        sums = [index for index, layout in laid_out if layout == SUMS]
        shards = [f"operand {index} {layout}" for index, layout in laid_out if isinstance(layout, Shard)]
        return " and ".join([*shards, *([f"partial sums in {_operands(sums)}"] if sums else [])])


def cases_of(rule: RuleText | None, avals: Sequence[Aval], parts: DimSplit) -> list[Case]:
    found = [Case("a replicated op", "", "Correct the local function", (None,) * len(avals))]
    if rule is not None:
        found += _of_factors(rule, avals, parts)
        found += _of_marks(rule, avals)
    found += _of_single_operands(avals, parts)
    by_layout: dict[Layouts, Case] = {}
    for case in found:
        by_layout.setdefault(case.layouts, case)
    return list(by_layout.values())


def factors_of(rule: RuleText, avals: Sequence[Aval]) -> dict[str, int]:
    """Return the sizes of the factors that a rule allows to be split; a dim of an ellipsis has a name like `.0`."""
    sizes = _sizes(rule, avals)
    return {name: size for name, size in sizes.items() if rule.marks.get(name) != "^" and size > 1}


def name_of(rule: RuleText, factor: str) -> str:
    if factor.startswith("."):
        return f"factor ... (its dim {-1 - int(factor[1:])})"
    return f"factor {factor}{rule.marks.get(factor, '')}"


def spec_of(layout: Shard | str | None, axis: str) -> P:
    """Return the spec of an operand. Partial sums are stacked along a new dim 0, which the axis splits."""
    if layout is None:
        return P()
    if not isinstance(layout, Shard):
        return P(axis)
    return P(*[None] * layout.dim, axis if layout.outer == 1 else (layout.outer, axis))


# --- Kinds of cases ---


def _of_factors(rule: RuleText, avals: Sequence[Aval], parts: DimSplit) -> Iterator[Case]:
    fits = _fits(rule, avals)
    sizes = _sizes(rule, avals)
    for factor, size in factors_of(rule, avals).items():
        mark = rule.marks.get(factor, "")
        fix = _FIXES.get(mark, "Mark the factor ^, or correct the mark")
        blocks: tuple[Blocks, ...] = (1, 2, (2, 1)) if parts.is_even else (1,)
        for outer in blocks:
            if size % units(outer) or not parts.divide(size // units(outer)):
                continue
            layouts = tuple(placed(fit, SplitFactor(factor, outer), sizes) for fit in fits)
            yield Case(name_of(rule, factor), _PROMISES[mark], fix, layouts, factor)


def _of_marks(rule: RuleText, avals: Sequence[Aval]) -> Iterator[Case]:
    marks = [pattern.linear for pattern in rule.operands]
    together = [index for index, mark in enumerate(marks) if mark == "&"]
    groups = [[index] for index, mark in enumerate(marks) if mark == "~"] + ([together] if together else [])
    for group in groups:
        if not all(avals[index].is_differentiable or avals[index].dtype == torch.int64 for index in group):
            continue  # torch sums other integers and booleans in int64
        mark, them = marks[group[0]], "it" if len(group) == 1 else "them together"
        layouts = tuple(SUMS if index in group else None for index in range(len(avals)))
        claim = f"mark {mark} of {_operands(group)}"
        yield Case(claim, f"the op is linear in {them}", "Remove the mark", layouts, is_mark=True)


def _of_single_operands(avals: Sequence[Aval], parts: DimSplit) -> Iterator[Case]:
    for index, aval in enumerate(avals):
        options: list[Shard | str] = [Shard(dim) for dim, size in enumerate(aval.shape) if size and parts.divide(size)]
        options += [SUMS] if aval.is_differentiable else []
        for option in options:
            layouts = tuple(option if other == index else None for other in range(len(avals)))
            claim = f"the layout of operand {index}"
            yield Case(claim, "the op is correct for it", "Correct the rule's text, decide or local", layouts)


# --- Factors ---


def _fits(rule: RuleText, avals: Sequence[Aval]) -> list[tuple[tuple[str, ...], ...]]:
    where = f"the rule {rule.text!r}"
    return [pattern.fit(aval.shape, where) for pattern, aval in zip(rule.operands, avals, strict=True)]


def _sizes(rule: RuleText, avals: Sequence[Aval]) -> dict[str, int]:
    operands = [OperandInfo(aval, REPLICATED) for aval in avals]
    return factor_sizes(_fits(rule, avals), operands, f"the rule {rule.text!r}")


def _operands(group: Sequence[int]) -> str:
    return f"operand{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"
