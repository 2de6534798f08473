"""Registry of sharding rules, and the class of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import Target

from .. import _torch
from ..errors import RuleError
from ..ir import origin_of, register_differentiable, tensor_operands, where
from .rule_text import RuleText, parse_rule
from .texts import pointwise_text, results_of

if TYPE_CHECKING:
    from .decide import OpSharding
    from .op_context import OpContext


Text = str | Callable[[fx.Node], str]
Local = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    text: Text | None = None  # in the notation of `rules.notation`, or a function that writes it for a node
    local: Local | None = None  # `local(step, *args, **kwargs)` computes a rank's shard. None runs the op on operands.
    decide: Callable[[OpContext], OpSharding | None] | None = None  # first, for ops that no text describes (views)
    # whether `local` gets replicated operands as Invariant values, and casts those combined with rank-dependent values
    casts: bool = False
    moves_only: bool = False  # for an op without text, whether it computes nothing, so that partial sums pass
    # whether `local` counts duplicated samples of uneven shards once (`OpContext.once`). If not, they are zeros in one
    # operand that the op is linear in, or all operands are replicated.
    counts: bool = False
    # whether torch's derivative is not linear in the gradient, which must then not be partial sums
    whole_gradient: bool = False

    def text_for(self, node: fx.Node) -> RuleText:
        assert self.text is not None
        text = self.text if isinstance(self.text, str) else self.text(node)
        if not isinstance(text, str):
            raise RuleError(
                f"the rule of {where(node)} is a function that returned {text!r}; it must return the rule's text"
            )
        parsed, operands, results = parse_rule(text), len(tensor_operands(node)), results_of(node)
        if len(parsed.operands) != operands or len(parsed.results) != results:
            raise RuleError(
                f"the rule {text!r} of {where(node)} has {len(parsed.operands)} patterns for {operands} tensor "
                f"operands and {len(parsed.results)} for {results} results; write one for each"
            )
        return parsed


_rules: dict[Target, Rule] = {}


def register_rule(
    op: _torch.Op | _torch.OpPacket,
    text: Text,
    local: Local | None = None,
    *,
    function: Callable[..., Any] | None = None,
) -> None:
    """Register the sharding rule of an op.

    Args:
        op: an op, `torch.ops.mylib.scale_rows.default`, or a packet, `torch.ops.mylib.scale_rows`, for all its
            overloads.
        text: the rule, such as `"~r c, r -> r c"` (see `docs/rules.md`), or a function from the traced node to such a
            text.
        local: computes a rank's shard, `local(step, *args, **kwargs)`. The default is the op itself.
        function: for a custom op, the differentiable function that represents it. An example is `Scale.apply` of an
            autograd.Function with the op as its forward.

    Raises:
        RuleError: when the text does not parse.
        TypeError: when `op` is not an op, or the rule is neither a text nor a function.

    >>> import torch, functional_parallel as fp
    >>> lib = torch.library.Library("doctest_rules", "DEF")
    >>> _ = lib.define("double(Tensor x) -> Tensor")
    >>> fp.register_rule(torch.ops.doctest_rules.double, "~... -> ...")
    """
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise TypeError(f"register_rule takes an op, as torch.ops.mylib.scale_rows, not {op!r}")
    if isinstance(text, str):
        parse_rule(text)
    elif not callable(text):
        raise TypeError(f"register_rule({op}): a rule is a text such as '~r c, r -> r c', or a function, not {text!r}")
    overloads = [getattr(op, name) for name in op.overloads()] if isinstance(op, torch._ops.OpOverloadPacket) else [op]
    for overload in overloads:
        _rules[overload] = Rule(text, local)
        if function is not None:
            register_differentiable(overload, function)


def rule(ops: Iterable[Target], entry: Rule) -> None:
    for op in ops:
        _rules[op] = entry


def lookup(op: Target) -> Rule | None:
    """Return the rule of an op. Elementwise ops without a rule share one. None for any other op without a rule."""
    entry = _rules.get(origin_of(op))
    if entry is None and isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags:
        return _POINTWISE
    return entry


_POINTWISE = Rule(pointwise_text)
