"""Running a traced global function on one rank's shards: per op, decide, convert, compute.

Values may belong to any torch.func level, so derivatives of what runs here are derivatives of the partitioned function,
collectives included.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .. import collectives as fp
from ..collectives import DimSplit
from ..ir import (
    Aval,
    Traced,
    at_source,
    current_source,
    eval_node,
    explicit_casts,
    grad_mode_of,
    info,
    is_trained,
    source_of,
    tensor_operands,
    walk_args,
    warn_at,
)
from ..rules import (
    PARTIAL,
    REDUCED,
    REPLICATED,
    REPLICATED_VARYING,
    AxisLayout,
    OpContext,
    OperandInfo,
    OpSharding,
    Reduced,
    Replicated,
    Rule,
    Shard,
    TargetLayout,
    choose_sharding,
    convert,
    lookup,
    mask_duplicates,
    parse_rule,
)
from .decompose import decomposed
from .slicing import split_backwards

__all__ = ["PartitionError", "PartitionWarning", "run_partitioned"]


class PartitionError(ValueError):
    """A function that cannot be partitioned as the specs ask."""


class PartitionWarning(UserWarning):
    """An op computed whole on every rank because nothing says how to split it."""


@dataclass
class _Value:
    """One value of the global function: its place, this rank's part, and the forms it was converted to."""

    place: AxisLayout
    part: Any
    is_parameter: bool = False
    forms: dict[TargetLayout, Any] = field(default_factory=dict)


def run_partitioned(
    traced: Traced,
    parts: Sequence[torch.Tensor],
    places: Sequence[AxisLayout],
    *,
    axis: str,
    cut: DimSplit,
    is_parameter: Sequence[bool],
    out_places: Sequence[AxisLayout | None] | None = None,
    strict: bool = False,
) -> tuple[list[Any], list[AxisLayout]]:
    """Compute a rank's part of a traced function.

    Args:
        traced: the function at global shapes, prepared.
        parts: this rank's part of each input, then of each captured tensor.
        places: how each lies along the axis.
        axis: the mesh axis.
        cut: into which parts it cuts.
        is_parameter: which inputs keep their place when operands of an op disagree.
        out_places: how the results shall lie; None leaves a result sharded, and completes partial sums.
        strict: refuse ops without a rule instead of computing them whole.

    Returns:
        This rank's part of each output, and its place.
    """
    run = _ShardInterpreter(axis, cut, strict)
    inputs = [*traced.inputs, *traced.captured_inputs]
    for node, part, place, static in zip(inputs, parts, places, is_parameter, strict=True):
        run.values[node] = _Value(place, part, static)
    with explicit_casts():
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                run.values[node] = _Value(REPLICATED, traced.constants[node.target])
            elif node.op == "call_function":
                with at_source(source_of(node)):
                    run.compute(node)
        return run.results(traced.outputs, out_places)


class _ShardInterpreter:
    def __init__(self, axis: str, cut: DimSplit, strict: bool) -> None:
        self.axis, self.cut, self.strict = axis, cut, strict
        self.values: dict[fx.Node, Any] = {}
        self.stands_for: dict[fx.Node, fx.Node] = {}  # of a graph that is run in place of an op, its inputs

    # --- one op ---

    def compute(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]
            return
        step = self._step(node)
        if lookup(node.target) is None and _is_split(step) and self._decompose(node):
            return
        rule = self._rule(step)
        step.decision = _decision(rule, step)
        completed = rule.whole_gradient and _is_reduced(step)
        reduced = _is_reduced(step) and not completed
        whole = REDUCED if reduced else REPLICATED_VARYING if step.decision.varying and not rule.casts else REPLICATED
        args, kwargs = self._arguments(node, tensor_operands(node), step.decision, whole, completed)
        if reduced:
            step.decision = replace(step.decision, results=tuple(map(_reduced, step.results)))
        with grad_mode_of(node):
            outputs = rule.local(step, *args, **kwargs) if rule.local else step.run(*args, **kwargs)
            self._store(node, step, outputs)

    def _decompose(self, node: fx.Node) -> bool:
        """Compute an op from simpler ones, if it can be."""
        traced = decomposed(node)
        if traced is None:
            return False
        for inner in traced.graph.nodes:
            if inner.op == "get_attr":
                self.values[inner] = _Value(REPLICATED, traced.constants[inner.target])
        for inner, operand in zip(traced.inputs, tensor_operands(node), strict=True):
            self.values[inner], self.stands_for[inner] = self.values[operand], self.stands_for.get(operand, operand)
        for inner in traced.nodes:
            self.compute(inner)
        values = [self.values[output] if isinstance(output, fx.Node) else output for output in traced.outputs]
        self.values[node] = values if isinstance(info(node).val, tuple) else values[0]
        return True

    def _operand(self, node: fx.Node) -> OperandInfo:
        value: _Value = self.values[node]
        completed = value.place == PARTIAL and REPLICATED in value.forms  # to go on with parts would cost another sum
        return OperandInfo(info(node).aval, REPLICATED if completed else value.place, value.is_parameter)

    def _rule(self, step: OpContext) -> Rule:
        rule = lookup(step.node.target)
        if rule is not None:
            return rule
        message = (
            f"no sharding rule for {step.where}: it is computed whole on every rank of axis {self.axis!r}. "
            f"Give it one with fp.register_rule({step.node.target}, '… -> …')"
        )
        if _is_split(step):
            if self.strict:
                raise PartitionError(message)
            warn_at(source_of(step.node), message, PartitionWarning)
        return _COMPUTE_REPLICATED

    def _arguments(
        self, node: fx.Node, operands: list[fx.Node], decision: OpSharding, whole: TargetLayout, completed: bool = False
    ) -> tuple[Any, Any]:
        """The node's arguments with each tensor converted to what the decision requires.

        `whole` is the form that whole operands take beside the others; with `completed`, none of them is Reduced.
        """
        remaining = enumerate(zip(operands, decision.operands, strict=True))

        def visit(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            index, (operand, required) = next(remaining)
            if completed and self.values[operand].place == REDUCED:
                return self._with_whole_gradient(operand)
            part = self._in_form(operand, whole if isinstance(required, (Replicated, Reduced)) else required)
            return mask_duplicates(part, required, self.axis, self.cut) if index in decision.masked else part

        return walk_args((node.args, node.kwargs), visit)

    def _in_form(self, node: fx.Node, form: TargetLayout) -> Any:
        node = self.stands_for.get(node, node)
        value = self.values[node]
        if form == value.place:
            return value.part
        held_whole = isinstance(value.place, (Replicated, Reduced))
        if held_whole and (form == REPLICATED or not (isinstance(form, Shard) or info(node).aval.is_differentiable)):
            return value.part
        if form not in value.forms:
            if isinstance(form, Shard) and value.place == REPLICATED:
                value.forms[form] = self._sliced(node, value, form)
            else:  # partial sums are completed on behalf of the op that left them
                with at_source(source_of(node) if value.place == PARTIAL else current_source()):
                    value.forms[form] = self._converted(value, form)
        return value.forms[form]

    def _with_whole_gradient(self, node: fx.Node) -> Any:
        """A Reduced value as an Invariant one, once for all ops that need it."""
        value: _Value = self.values[node]
        if REPLICATED not in value.forms:
            value.forms[REPLICATED] = convert(value.part, REDUCED, REPLICATED, self.axis, self.cut)
        return value.forms[REPLICATED]

    def _converted(self, value: _Value, form: TargetLayout) -> Any:
        if form == REPLICATED_VARYING and value.place == PARTIAL:  # one psum, however many ops take it whole
            whole = value.forms.get(REPLICATED)
            if whole is None:
                whole = value.forms[REPLICATED] = convert(value.part, PARTIAL, REPLICATED, self.axis, self.cut)
            return convert(whole, REPLICATED, REPLICATED_VARYING, self.axis, self.cut)
        return convert(value.part, value.place, form, self.axis, self.cut)

    def _sliced(self, node: fx.Node, value: _Value, form: Shard) -> Any:
        """A slice of a whole value, computed from slices of what it was computed from.

        Slicing the value itself would gather its gradient; a broadcast parameter, say, wants only its own summed. The
        whole value is dead code then, if nothing else uses it.
        """
        is_op = node.op == "call_function" and node.target is not operator.getitem
        source = split_backwards(self._step(node), form) if is_op else None
        if source is None:
            return self._converted(value, form)
        step, rule = source
        args, kwargs = self._arguments(node, tensor_operands(node), step.decision, REPLICATED_VARYING)
        with at_source(source_of(node)), grad_mode_of(node):
            return rule.local(step, *args, **kwargs) if rule.local else step.run(*args, **kwargs)

    def _step(self, node: fx.Node) -> OpContext:
        operands = [self._operand(operand) for operand in tensor_operands(node)]
        return OpContext(node, self.axis, self.cut, operands, _results(node), eval_node)

    def _store(self, node: fx.Node, step: OpContext, outputs: Any) -> None:
        static = bool(step.operands) and all(operand.is_parameter for operand in step.operands)
        parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        if step.decision.extremum:
            parts = [_over_ranks(step.decision.extremum, part, self.axis) for part in parts]
        values = [_Value(place, part, static) for place, part in zip(step.decision.results, parts, strict=False)]
        self.values[node] = values if isinstance(info(node).val, tuple) else values[0]

    # --- the end ---

    def results(
        self, outputs: list[Any], wanted: Sequence[AxisLayout | None] | None
    ) -> tuple[list[Any], list[AxisLayout]]:
        parts: list[Any] = []
        places: list[AxisLayout] = []
        for index, output in enumerate(outputs):
            if not isinstance(output, fx.Node):
                parts.append(output)
                places.append(REPLICATED)
                continue
            held = self.values[output].place
            place = wanted[index] if wanted is not None else None
            place = place if place is not None else (REPLICATED if held in (PARTIAL, REDUCED) else held)
            with at_source(source_of(output)):
                parts.append(self._result(output, place))
            places.append(place)
        return parts, places

    def _result(self, output: fx.Node, place: AxisLayout) -> Any:
        value = self.values[output]
        if value.place == REDUCED and place == REPLICATED:
            if info(output).aval.is_differentiable:
                return convert(value.part, REDUCED, REPLICATED, self.axis, self.cut)
            return value.part.clone()  # of a parameter: what is computed without a gradient lies whole
        return self._in_form(output, place)


def _is_split(step: OpContext) -> bool:
    return any(not isinstance(operand.place, (Replicated, Reduced)) for operand in step.operands)


def _is_reduced(step: OpContext) -> bool:
    """Whether an op is computed of a value whose gradient is wanted as partial sums."""
    free = step.decision.varying or step.decision.of_shapes
    return not free and any(isinstance(operand.place, Reduced) for operand in step.operands)


def _reduced(result: Aval | None) -> AxisLayout:
    """Where that leaves a result; an op may leave out one that it was not asked for."""
    return REDUCED if result is not None and result.is_differentiable else REPLICATED


def _results(node: fx.Node) -> list[Aval | None]:
    return list(info(node).results)


def _decision(rule: Rule, step: OpContext) -> OpSharding:
    decision = rule.decide(step) if rule.decide is not None else None
    if decision is None:
        text = parse_rule(rule.text_for(step.node))
        decision = choose_sharding(text, step.operands, step.results, step.parts, step.where, rule.counts)
    return decision


def _whole(step: OpContext) -> OpSharding:
    return OpSharding((REPLICATED,) * len(step.operands), (REPLICATED,) * len(step.results))


_COMPUTE_REPLICATED = Rule(decide=_whole)


def _over_ranks(extremum: str, part: torch.Tensor, axis: str) -> torch.Tensor:
    """The maximum (minimum) over ranks, its gradient shared evenly by the ranks that hold it."""
    combine = fp.pmax if extremum == "pmax" else fp.pmin
    best = combine(part.detach(), axis)
    if not is_trained(part):
        return best
    holds = part == best
    share = holds.to(part.dtype) / fp.pvary(fp.psum(holds.to(part.dtype), axis), axis)
    return best + fp.psum(torch.where(holds & part.isfinite(), part - best, 0) * share, axis)
