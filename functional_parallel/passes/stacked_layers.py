"""Replace layers of stacked values by the values that were stacked, so that ops work on one layer at a time.

`stack(xs)[i]` is `xs[i]`. This also holds if the stack passes through ops that treat every layer identically: a cast, a
gather or sum over ranks, an addition. The gradient of `stack(xs)[i]` is zero except for layer i. Adding such gradients
and splitting the sum into layers yields the original gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, collective_call, first_operand, info, operands_of, simplify
from .program_pass import Phase, ProgramPass, Settings

aten = torch.ops.aten


class _Zero(Enum):
    ZERO = 0  # a layer of zeros


_ZERO = _Zero.ZERO
_UNARY = {aten._to_copy.default, aten.alias.default, aten.detach.default, aten.neg.default}


@dataclass(frozen=True)
class SeparateLayers(ProgramPass):
    """Let ops read and compute each layer of stacked values separately."""

    name: ClassVar[str] = "layers"
    phase: ClassVar[Phase] = Phase.CUT
    is_required: ClassVar[bool] = True

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [] if settings.pipelined is None else [cls()]

    def run(self, traced: Traced, mesh: Mesh) -> None:
        simplify(fold_layers(traced))


def fold_layers(traced: Traced) -> Traced:
    """Replace every layer of a stack by the value that was stacked, in place. Return the sealed graph."""
    return _Fold(traced).result()


class _Fold:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.found: dict[tuple[fx.Node, int], fx.Node | _Zero | None] = {}

    def result(self) -> Traced:
        for node in list(self.traced.nodes):
            taken = _taken(node)
            if taken is None or taken[0].op != "call_function" or taken[0].target in (aten.select.int, aten.unbind.int):
                continue
            layer = self.layer(*taken)
            if layer is not None:
                self.traced.replace(node, self._written_zero(node) if layer is _ZERO else layer)
        self.traced.seal()
        return self.traced

    def layer(self, stacked: fx.Node, index: int) -> fx.Node | _Zero | None:
        """Return layer `index` of a stack as a node, `_ZERO`, or None if it is unknown."""
        key = (stacked, index)
        if key not in self.found:
            self.found[key] = self._layer(stacked, index)
        layer = self.found[key]
        while isinstance(layer, fx.Node) and (by := info(layer).replaced_by) is not None:
            layer = self.found[key] = by
        return layer

    def _layer(self, stacked: fx.Node, index: int) -> fx.Node | _Zero | None:
        target, args = stacked.target, stacked.args
        if target is aten.stack.default and (len(args) < 2 or args[1] == 0):
            return args[0][index]
        if target is aten.select_backward.default and args[2] == 0:
            return args[0] if args[3] % args[1][0] == index else _ZERO
        if target is aten.add.Tensor and not stacked.kwargs:
            return self._sum(stacked, [self.layer(each, index) for each in args if isinstance(each, fx.Node)])
        if not operands_of(stacked) or not self._is_each_layer_alone(stacked):
            return None
        operand = self.layer(first_operand(stacked), index)
        if operand is None or operand is _ZERO:
            return operand
        return self._write(stacked, _on_one_layer(stacked, operand))

    def _is_each_layer_alone(self, node: fx.Node) -> bool:
        target = node.target
        if target in _UNARY:
            return True
        if target in (aten.slice.Tensor, aten.constant_pad_nd.default):
            return _dims_of(node) > 0
        call = collective_call(node, "pcast", "psum", "all_gather", "psum_scatter", "pscatter")
        return call is not None and 0 not in call.dims

    def _sum(self, stacked: fx.Node, parts: list[fx.Node | _Zero | None]) -> fx.Node | _Zero | None:
        if len(parts) != 2 or any(part is None for part in parts):
            return None
        kept = [part for part in parts if part is not _ZERO]
        if len(kept) < 2:
            return kept[0] if kept else _ZERO
        return self._write(stacked, tuple(kept))

    def _write(self, like: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        with self.traced.graph.inserting_before(like):
            known = info(like)._replace(val=replace(info(like).aval, shape=info(like).aval.shape[1:]))
            return self.traced.call(like.target, args, known, dict(like.kwargs))

    def _written_zero(self, node: fx.Node) -> fx.Node:
        value = info(node).aval
        options = {"dtype": value.dtype, "device": value.device}
        with self.traced.graph.inserting_before(node):
            return self.traced.call(aten.full.default, (list(value.shape), 0), info(node), options)


def _taken(node: fx.Node) -> tuple[fx.Node, int] | None:
    if node.target is aten.select.int and node.args[1] == 0:
        return node.args[0], node.args[2] % info(node.args[0]).aval.shape[0]
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int and len(node.args[0].args) < 2:
        return node.args[0].args[0], node.args[1]
    return None


def _dims_of(node: fx.Node) -> int:
    if node.target is aten.slice.Tensor:
        return node.args[1] if len(node.args) > 1 else 0
    padded = len(node.args[1]) // 2
    return info(node).aval.ndim - padded


def _on_one_layer(node: fx.Node, operand: fx.Node) -> tuple[Any, ...]:
    if call := collective_call(node):
        return replace(call, operand=operand).with_dims(lambda dim: dim - 1).args
    rest = list(node.args[1:])
    if node.target is aten.slice.Tensor:
        rest[0] -= 1
    return (operand, *rest)
