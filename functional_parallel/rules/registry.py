"""Where rules are kept, and what one consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..ir import register_differentiable, where
from .notation import RuleError, parse_rule
from .texts import pointwise_text

if TYPE_CHECKING:
    from .decide import OpSharding
    from .op_context import OpContext

__all__ = ["Rule", "is_elementwise", "lookup", "register_rule", "rule"]

Text = str | Callable[[fx.Node], str]
Local = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one op is partitioned.

    `text` is the rule in the notation of `rules.notation`, or a function that writes it for a node. `decide` is
    asked first, for ops that no text describes (views); it may answer None. `local(step, *args, **kwargs)` computes a
    rank's part when that is not just the op itself on the rank's operands. With `casts`, `local` gets whole operands as
    they are, invariant, and casts those itself that meet rank-dependent values. `moves_only` says of an op without text
    that it computes nothing, so partial sums pass through it. With `counts`, `local` counts samples that unequal parts
    hold twice once (`OpContext.once`); without, one operand that the op is linear in has zeros there, or all are whole.
    `whole_gradient` says that torch's derivative is computed by ops that are not linear in the gradient, which must not
    be partial sums then.
    """

    text: Text | None = None
    local: Local | None = None
    decide: Callable[[OpContext], OpSharding | None] | None = None
    casts: bool = False
    moves_only: bool = False
    counts: bool = False
    whole_gradient: bool = False

    def text_for(self, node: fx.Node) -> str:
        assert self.text is not None
        text = self.text if isinstance(self.text, str) else self.text(node)
        if not isinstance(text, str):
            raise RuleError(
                f"the rule of {where(node)} is a function that returned {text!r}; it shall return the rule's text"
            )
        return text


_rules: dict[Any, Rule] = {}


def register_rule(
    op: Any, text: Text, local: Local | None = None, *, function: Callable[..., Any] | None = None
) -> None:
    """Say how an op is partitioned, in one line.

    Args:
        op: an op, `torch.ops.mylib.scale_rows.default`, or a packet, `torch.ops.mylib.scale_rows`, for all its
        overloads.
        text: the rule, `"~r c, r -> r c"`, see `docs/rules.md`; or a function from the traced node to such a text.
        local: computes a rank's part, `local(step, *args, **kwargs)`; the op itself when left out.
        function: the differentiable function that stands for the op, for a library op of your own: `Scale.apply` of an
            autograd.Function whose forward is the op alone.

    Raises:
        RuleError: when the text does not parse.
        TypeError: when the op is none, or the rule neither text nor function.

    >>> import torch, functional_parallel as fp
    >>> lib = torch.library.Library("doctest_rules", "DEF")
    >>> _ = lib.define("double(Tensor x) -> Tensor")
    >>> fp.register_rule(torch.ops.doctest_rules.double, "~... -> ...")
    """
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise TypeError(
            f"register_rule takes an op, as torch.ops.mylib.scale_rows, not {op!r}; a function that is made of torch's "
            "ops needs no rule"
        )
    if isinstance(text, str):
        parse_rule(text)
    elif not callable(text):
        raise TypeError(f"register_rule({op}): a rule is a text such as '~r c, r -> r c', or a function, not {text!r}")
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, torch._ops.OpOverloadPacket) else [op]
    for overload in overloads:
        _rules[overload] = Rule(text, local)
        if function is not None:
            register_differentiable(overload, function)


def rule(ops: Iterable[Any], entry: Rule) -> None:
    """Enter one rule for several ops."""
    for op in ops:
        _rules[op] = entry


def lookup(op: Any) -> Rule | None:
    """The rule of an op: its own, else the one every elementwise op shares, else None."""
    entry = _rules.get(op)
    if entry is None and isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags:
        return _POINTWISE
    return entry


def is_elementwise(op: Any) -> bool:
    """Whether an op makes every element of those in its place alone: torch tags it so, or its rule names no dim."""
    if torch.Tag.pointwise in getattr(op, "tags", ()):
        return True
    entry = _rules.get(op, _NONE)
    text = entry.text if isinstance(entry.text, str) else None
    alike = entry.text is pointwise_text or (text is not None and not any(map(str.isalnum, text)))
    return alike and entry.local is None


_NONE = Rule()
_POINTWISE = Rule(pointwise_text)
