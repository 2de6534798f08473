"""Choose the factor that an op is sharded on, and the layouts of its operands and results.

There is one decision per op. Decisions are made in graph order and depend only on the layouts of the operands. If
operands disagree, a factor that a parameter is sharded on is preferred: parameters keep the layout of their spec, and
activations are converted. The next criterion is the operand with the most bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sharding_specs.blocks import Blocks, inside, nested, units

from ..collectives import DimSplit
from ..errors import RuleError
from ..ir import Aval
from .axis_layout import PARTIAL, REPLICATED, AxisLayout, Partial, Shard
from .rule_text import RuleText

Factors = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OperandInfo:
    aval: Aval
    place: AxisLayout
    is_parameter: bool = False
    is_constant: bool = False  # whether it depends on no input, so that no gradient flows to it
    is_zero: bool = False  # whether it is known to be zeros, where others are partial sums
    is_read_once: bool = False  # whether no other op reads it


@dataclass(frozen=True)
class SplitFactor:
    """Factor that an op is sharded on. It is viewed as (outer, ranks, rest), and the ranks split the middle."""

    factor: str
    outer: Blocks = 1


@dataclass(frozen=True)
class OpSharding:
    operands: tuple[AxisLayout, ...]
    results: tuple[AxisLayout, ...]
    choice: SplitFactor | None = None
    extremum: str = ""  # "pmax" or "pmin" if the results must be combined by that collective
    masked: tuple[int, ...] = ()  # operands that must have zeros for the second copy of a duplicated sample
    of_shapes: bool = False  # whether the op reads only shape, dtype or device of its operands

    @property
    def varying(self) -> bool:
        return any(isinstance(place, (Partial, Shard)) for place in self.operands)


def choose_sharding(
    rule: RuleText,
    operands: Sequence[OperandInfo],
    results: Sequence[Aval | None],
    parts: DimSplit,
    where: str,
    counts: bool = False,
) -> OpSharding:
    """Apply a text rule. With `counts`, the op's own lowering ignores the samples that uneven shards duplicate."""
    ones = parts.ranks == 1 and len({operand.aval.shape for operand in operands}) == 1
    fits = [pattern.fit(op.aval.shape, where, ones=ones) for pattern, op in zip(rule.operands, operands, strict=True)]
    sizes = factor_sizes(fits, operands, where)
    choice = _choose(rule, fits, operands, sizes, parts, counts)
    if choice is None:
        return _without_choice(rule, operands, len(results))
    required = tuple(placed(fit, choice, sizes) or REPLICATED for fit in fits)
    mark = rule.marks.get(choice.factor, "")
    places: list[AxisLayout] = []
    for pattern, aval in zip(rule.results, results, strict=False):
        if aval is None:  # a gradient that is not requested
            places.append(REPLICATED)
            continue
        place = placed(pattern.fit(aval.shape, where, ones=ones), choice, sizes)
        if place is None and not mark:
            raise RuleError(f"{where}: {rule.text!r} drops factor {choice.factor}, which needs a mark (+, >, ^, …)")
        places.append(place or (PARTIAL if mark in "+?" else REPLICATED))
    masked = () if parts.is_even or counts or not mark else _summed_alone(rule, fits, operands, choice.factor)
    return OpSharding(required, tuple(places), choice, {">": "pmax", "<": "pmin"}.get(mark, ""), masked)


def _choose(
    rule: RuleText,
    fits: list[Factors],
    operands: Sequence[OperandInfo],
    sizes: dict[str, int],
    parts: DimSplit,
    counts: bool,
) -> SplitFactor | None:
    best: tuple[tuple[bool, int], SplitFactor] | None = None
    for fit, operand in zip(fits, operands, strict=True):
        choice = find_factor(fit, operand.place, sizes, parts)
        mark = None if choice is None else rule.marks.get(choice.factor)
        if choice is None or mark == "^":
            continue
        if mark and not (
            parts.is_even or counts or (mark == "+" and _summed_alone(rule, fits, operands, choice.factor))
        ):
            continue  # samples that uneven shards duplicate would count twice
        weight = (operand.is_parameter, operand.aval.nbytes)
        if best is None or weight > best[0]:
            best = (weight, choice)
    return best[1] if best else None


def _summed_alone(rule: RuleText, fits: list[Factors], operands: Sequence[OperandInfo], factor: str) -> tuple[int, ...]:
    """Index of the smallest operand with `factor` that the op is linear in, so that zeros add nothing; () if none."""
    found = [
        (operand.aval.nbytes, index)
        for index, (fit, operand) in enumerate(zip(fits, operands, strict=True))
        if rule.operands[index].linear == "~" and any(factor in names for names in fit)
    ]
    return (min(found)[1],) if found else ()


def find_factor(fit: Factors, place: AxisLayout, sizes: dict[str, int], parts: DimSplit) -> SplitFactor | None:
    """Return the factor that a sharded operand is split on, or None if the split cuts across factors."""
    if not isinstance(place, Shard):
        return None
    before = 1
    for factor in fit[place.dim]:
        extent = sizes[factor]
        inner = inside(place.outer, before)
        if inner is not None and extent % units(inner) == 0 and parts.divide(extent // units(inner)):
            return SplitFactor(factor, inner)
        before *= extent
    return None


def placed(fit: Factors, choice: SplitFactor, sizes: dict[str, int]) -> Shard | None:
    for dim, factors in enumerate(fit):
        if choice.factor in factors:
            before = math.prod(sizes[name] for name in factors[: factors.index(choice.factor)])
            return Shard(dim, nested(before, choice.outer))
    return None


def _without_choice(rule: RuleText, operands: Sequence[OperandInfo], results: int) -> OpSharding:
    """Return the decision for an op without a factor to split on.

    Partial sums pass through if the op is linear in them; else they are resolved. One rank adds a constant to them. In
    a product of two partial sums both are resolved. One has to be, and its product with the other would need a second
    psum. A square then takes one psum.
    """
    partial = [isinstance(op.place, Partial) for op in operands]
    keep = [False] * len(operands)
    together = [index for index, pattern in enumerate(rule.operands) if pattern.linear == "&"]
    if _are_summands([operands[index] for index in together]):
        keep = [index in together for index in range(len(operands))]
    elif not together:
        keep = [pattern.linear == "~" and partial[i] and sum(partial) == 1 for i, pattern in enumerate(rule.operands)]
    required = tuple(PARTIAL if kept else REPLICATED for kept in keep)
    return OpSharding(required, (PARTIAL if any(keep) else REPLICATED,) * results)


def _are_summands(together: Sequence[OperandInfo]) -> bool:
    """Whether operands are partial sums, or zeros or constants next to partial sums. One rank adds a constant."""
    # Another op that reads the partial sums may need them complete. The sum with the constant is then a second psum.
    sums = [operand for operand in together if isinstance(operand.place, Partial)]
    rest = [operand for operand in together if not isinstance(operand.place, Partial) and not operand.is_zero]
    largest = max((operand.aval.numel for operand in sums), default=0)
    added = all(each.is_constant and each.place == REPLICATED and each.aval.numel <= largest for each in rest)
    return bool(sums) and (not rest or (added and all(operand.is_read_once for operand in sums)))


def factor_sizes(fits: list[Factors], operands: Sequence[OperandInfo], where: str) -> dict[str, int]:
    dims = [(f, s) for fit, op in zip(fits, operands, strict=True) for f, s in zip(fit, op.aval.shape, strict=True)]
    sizes = {factors[0]: extent for factors, extent in dims if len(factors) == 1}
    for factors, extent in dims:
        unknown = [name for name in factors if name not in sizes]
        if len(unknown) > 1:
            raise RuleError(
                f"{where}: the sizes of the factors {', '.join(unknown)} of a dim of size {extent} are ambiguous"
            )
        for name in unknown:
            sizes[name] = extent // math.prod(sizes[other] for other in factors if other != name)
    return sizes
