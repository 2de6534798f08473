"""Sample calls of an op, for a check of its sharding rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch
from torch import fx

from ..functions import PyTree, filled
from ..ir import Aval, Traced, aval_of, eval_node, tensor_operands
from ..partitioner import prepare
from ..rules import RuleText, lookup
from ..tracing import recorder
from .intermediate import traced_leaves


@dataclass(frozen=True)
class Sample:
    op: Callable[..., PyTree]
    number: int
    leaves: list[PyTree]
    tree: optree.PyTreeSpec
    operands: list[int]
    rule: RuleText | None

    def __str__(self) -> str:
        return f"sample {self.number} ({', '.join(map(str, self.avals))})"

    @property
    def values(self) -> list[torch.Tensor]:
        return [self.leaves[index] for index in self.operands]

    @property
    def avals(self) -> list[Aval]:
        return [aval_of(value) for value in self.values]

    def call(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _call(self.op, *filled(self.leaves, self.operands, values, self.tree))


def sample_of(op: Callable[..., PyTree], number: int, sample: tuple[PyTree, ...]) -> Sample:
    if not isinstance(sample, tuple):
        kind = type(sample).__name__
        raise TypeError(f"check_rule({op}): sample {number} is a {kind}; give a tuple of the op's arguments")
    has_keywords = len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict)
    call = sample if has_keywords else (sample, {})
    leaves, tree = optree.tree_flatten(call)
    traced = traced_leaves(partial(_call, op), call)
    node = _call_of(op, traced) or _call_of(op, prepare(traced))
    if node is None:
        names = ", ".join(str(node.target) for node in traced.nodes) or "no op at all"
        raise ValueError(f"check_rule({op}): the graph of sample {number} holds {names}, not the op; check those")
    tensors = (index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    by_input = dict(zip(traced.inputs, tensors, strict=True))
    operands = [by_input.get(operand) for operand in tensor_operands(node)]
    if None in operands:
        raise ValueError(f"check_rule({op}): sample {number} reaches the op through other ops; call it directly")
    entry = lookup(op)
    assert entry is not None
    text = None if entry.text is None else entry.text_for(node)
    return Sample(op, number, leaves, tree, [index for index in operands if index is not None], text)


def _call_of(op: Callable[..., PyTree], traced: Traced) -> fx.Node | None:
    return next((node for node in traced.nodes if node.target == op), None)


def _call(op: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[torch.Tensor]:
    """Call the op: with its derivative outside of a trace, and as the op itself inside one."""
    result = op(*args, **kwargs) if recorder() is not None else eval_node(op, args, kwargs)
    return [leaf for leaf in optree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def require_overload(op: Callable[..., PyTree]) -> None:
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = ", ".join(f"{op}.{name}" for name in op.overloads())
        raise TypeError(f"check_rule takes one overload of {op}, not all of them: {names}")
    if lookup(op) is None:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"check_rule takes an op, such as torch.ops.mylib.scale_rows.default, not {op!r}")
        raise ValueError(f"check_rule({op}): the op has no rule; register one with fp.register_rule")


def for_all(samples: Any, check: Callable[[int, tuple[PyTree, ...]], None]) -> None:
    """Check each sample with its number; of a hypothesis strategy, ten examples with the number 0."""
    strategies = sys.modules.get("hypothesis.strategies")
    if strategies is None or not isinstance(samples, strategies.SearchStrategy):
        for number, sample in enumerate(samples):
            check(number, sample)
        return
    import hypothesis

    quick = hypothesis.settings(max_examples=10, deadline=None, database=None)
    drawing: Callable[..., Callable[[], None]] = hypothesis.given(samples)
    quick(drawing(lambda sample: check(0, sample)))()
