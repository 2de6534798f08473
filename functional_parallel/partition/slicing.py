"""Find the slices of an op's operands that give a slice of its result, by reading its rule from right to left."""

from __future__ import annotations

from dataclasses import replace

from ..ir import RESHAPES
from ..rules import (
    REPLICATED,
    OpContext,
    OpSharding,
    Rule,
    Shard,
    factor_sizes,
    find_factor,
    lookup,
    parse_rule,
    placed,
    reshaped_place,
)

__all__ = ["split_backwards"]


def split_backwards(step: OpContext, form: Shard) -> tuple[OpContext, Rule] | None:
    """Return a step that computes a slice of a result from slices of replicated operands, or None without a rule."""
    rule = lookup(step.node.target)
    if rule is None or len(step.results) != 1 or any(operand.place != REPLICATED for operand in step.operands):
        return None
    if step.node.target in RESHAPES:
        decision = _through_view(step, form)
    else:
        decision = _through_text(step, rule, form) if rule.text is not None and not rule.casts else None
    return None if decision is None else (replace(step, decision=decision), rule)


def _through_view(step: OpContext, form: Shard) -> OpSharding | None:
    before, after = step.operands[0].aval.shape, step.result().shape
    place = reshaped_place(after, before, form, step.parts)
    if not isinstance(place, Shard) or reshaped_place(before, after, place, step.parts) != form:
        return None
    return OpSharding((place,), (form,))


def _through_text(step: OpContext, rule: Rule, form: Shard) -> OpSharding | None:
    text = parse_rule(rule.text_for(step.node))
    fits = [pattern.fit(op.aval.shape, step.where) for pattern, op in zip(text.operands, step.operands, strict=True)]
    result = text.results[0].fit(step.result().shape, step.where)
    sizes = factor_sizes(fits, step.operands, step.where)
    sizes.update({names[0]: n for names, n in zip(result, step.result().shape, strict=True) if len(names) == 1})
    choice = find_factor(result, form, sizes, step.parts)
    if choice is None or text.marks.get(choice.factor):
        return None
    known = any(choice.factor in names for fit in fits for names in fit)
    if not known and not step.node.target._schema.name.endswith("::expand"):
        return None
    required = tuple(placed(fit, choice, sizes) or REPLICATED for fit in fits)
    return OpSharding(required, (form,), choice)
