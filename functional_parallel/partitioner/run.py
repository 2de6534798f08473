"""Run a traced global function on the shards of one rank: per op, decide, convert, compute.

Values may belong to any torch.func level. Derivatives of this run are therefore derivatives of the partitioned
function, including its collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import collectives as fp
from ..checker import is_zero
from ..collectives import DimSplit
from ..errors import PartitionError, PartitionWarning
from ..functions import PyTree
from ..ir import (
    RESHAPES,
    Aval,
    Traced,
    at_source,
    copies_of,
    current_source,
    eval_node,
    explicit_casts,
    grad_mode_of,
    implied_source,
    info,
    is_trained,
    origin_of,
    primitive_name,
    source_of,
    tensor_operands,
    walk_args,
    warn_at,
)
from ..ops import OUTPUTS
from ..rules import (
    PARTIAL,
    REDUCED,
    REPLICATED,
    REPLICATED_VARYING,
    AxisLayout,
    OpContext,
    OperandInfo,
    OpSharding,
    Owned,
    Reduced,
    Replicated,
    Rule,
    Shard,
    TargetLayout,
    choose_sharding,
    convert,
    factor_sizes,
    find_factor,
    lookup,
    mask_duplicates,
    placed,
    reshaped_place,
)
from ..tracing import stand_in
from .decompose import crosses_ranks, decomposed
from .region import operand_layouts, peel, region_node
from .repeat import CopyRunner
from .values import HeldShards, PartitionedValue


def run_partitioned(
    traced: Traced,
    inputs: Sequence[PartitionedValue],
    axis: str,
    cut: DimSplit,
    *,
    out_places: Sequence[AxisLayout | None] | None = None,
    owner: Owned | None = None,
    strict: bool = False,
) -> tuple[list[PyTree], list[AxisLayout]]:
    """Run a traced function on the shards of one rank. Return this rank's shard of each output, and its layout.

    `traced` is prepared, at global shapes. `inputs` are its inputs, then the captured tensors. `out_places` are the
    required layouts of the results: None leaves a result sharded, and completes partial sums. With an `owner`, that
    rank holds the parameters and runs the ops on whole operands. If `strict`, ops without a rule raise an error instead
    of computing on full tensors.
    """
    by_op = set[int]()
    while True:
        run = _ShardInterpreter(axis, cut, strict, owner)
        for node, value in zip([*traced.inputs, *traced.captured_inputs], inputs, strict=True):
            run.hold(node, replace(value, forms=dict(value.forms)))
        try:
            with explicit_casts():
                run.run(traced, CopyRunner.of(run, by_op, is_repeating=owner is None))
                return run.results(traced.outputs, out_places)
        except _InsideCopyError as error:  # what was recorded is dead code
            by_op.add(error.form)


class _InsideCopyError(Exception):
    """A slice needs a value inside a repeated copy, which only a run op by op has."""

    def __init__(self, form: int) -> None:
        super().__init__(form)
        self.form = form


class _ShardInterpreter:
    def __init__(self, axis: str, cut: DimSplit, strict: bool, owner: Owned | None) -> None:
        self.axis, self.cut, self.strict, self.owner = axis, cut, strict, owner
        self.values: dict[fx.Node, Any] = {}
        self.stands_for: dict[fx.Node, fx.Node] = {}  # inputs of a graph that replaces an op → operands of the op
        self.sliced: list[fx.Node] = []  # values with a slice computed from other values
        self.form_of: dict[fx.Node, int] = {}  # form of the copy that an op belongs to
        self.held = HeldShards()

    def fork(self) -> _ShardInterpreter:
        """Return an interpreter of the same partition, without values."""
        return _ShardInterpreter(self.axis, self.cut, self.strict, self.owner)

    def run(self, traced: Traced, runner: CopyRunner | None = None) -> None:
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                constant = stand_in(traced.constants[node.target], info(node).aval.device)
                self.values[node] = PartitionedValue(REPLICATED, constant, is_constant=True)
        copies = {} if runner is None else {copy.nodes[0]: copy for copy in copies_of(traced)}
        self.form_of.update((node, copy.form) for copy in copies.values() for node in copy.nodes)
        for node in traced.nodes:
            if runner is not None and node in copies:
                runner(copies[node])
            elif runner is None or node not in self.form_of:
                self.visit(node)

    def visit(self, node: fx.Node) -> None:
        by_hand = primitive_name(node) is not None and not info(node).backward
        with at_source(source_of(node) if by_hand else implied_source(node)):
            self.compute(node)

    def hold(self, node: fx.Node, value: PartitionedValue | list[PartitionedValue]) -> None:
        self.values[node] = value
        for each in value if isinstance(value, list) else [value]:
            self.held.add(each)

    def compute(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]
            return
        if node.target is region_node:
            self._compute_region(node)
            return
        step = self._step(node)
        must_change = _is_split(step) and (lookup(node.target) is None or crosses_ranks(step))
        if must_change and (simpler := decomposed(node)) is not None:
            self._run_simpler(node, simpler)
            return
        rule = self._rule(step)
        alone = self.owner is not None and self._is_alone(node)
        step.decision = _whole(step) if alone else _decision(rule, step)
        completed = rule.whole_gradient and _is_reduced(step)
        reduced = _is_reduced(step) and not completed
        whole: TargetLayout = REDUCED if reduced else REPLICATED
        if not reduced and step.decision.varying and not rule.casts:
            whole = REPLICATED_VARYING
        on_whole = whole == REPLICATED and not step.decision.varying
        if self.owner is not None and on_whole and not self._is_on_all_ranks(tensor_operands(node)):
            whole, step.is_on_owner = self.owner, True
        args, kwargs = self._arguments(node, tensor_operands(node), step.decision, whole, completed)
        if reduced:
            step.decision = replace(step.decision, results=tuple(map(_reduced, step.results)))
        with grad_mode_of(node):
            outputs = rule.local(step, *args, **kwargs) if rule.local else step.run(*args, **kwargs)
            self._store(node, step, outputs, alone)

    def _compute_region(self, node: fx.Node) -> None:
        operands, region = node.args
        places = operand_layouts(region, [self.values[operand].place for operand in operands], self.axis)
        parts = list(map(self._operand_part, operands, places))

        def run(body: Traced, places: Sequence[AxisLayout], parts: Sequence[torch.Tensor]) -> Any:
            values = map(PartitionedValue, places, parts)
            return run_partitioned(body, list(values), self.axis, self.cut, strict=self.strict)

        with grad_mode_of(node):
            outputs, found = peel(region, places, parts, self.axis, self.cut, run)
        self.hold(node, list(map(PartitionedValue, found, outputs)))

    def _operand_part(self, operand: fx.Node, place: AxisLayout) -> torch.Tensor:
        value: PartitionedValue = self.values[operand]
        if place == REPLICATED and value.place in (PARTIAL, REDUCED) and is_trained(value.part):
            return self._replicated(value)
        return self._in_form(operand, place)

    def _is_alone(self, node: fx.Node) -> bool:
        """Whether only the owner computes an op: the mark of the outputs, and what follows from them."""
        return node.target is OUTPUTS or any(self.values[operand].is_alone for operand in tensor_operands(node))

    def _is_on_all_ranks(self, operands: Sequence[fx.Node]) -> bool:
        values = [self.values[operand] for operand in operands]
        return all(value.place == REPLICATED or REPLICATED in value.forms for value in values)

    def _run_simpler(self, node: fx.Node, traced: Traced) -> None:
        for inner, operand in zip(traced.inputs, tensor_operands(node), strict=True):
            self.values[inner], self.stands_for[inner] = self.values[operand], self.stands_for.get(operand, operand)
        self.run(traced)
        values = [self.values[output] if isinstance(output, fx.Node) else output for output in traced.outputs]
        self.values[node] = values if isinstance(info(node).val, tuple) else values[0]

    def _operand(self, node: fx.Node) -> OperandInfo:
        value: PartitionedValue = self.values[node]
        completed = value.place == PARTIAL and REPLICATED in value.forms  # the partial sums would need a second psum
        is_whole = completed or isinstance(value.place, Owned)
        place, once = REPLICATED if is_whole else value.place, len(node.users) == 1
        return OperandInfo(info(node).aval, place, value.is_parameter, value.is_constant, is_read_once=once)

    def _rule(self, step: OpContext) -> Rule:
        rule = lookup(step.node.target)
        if rule is not None:
            return rule
        message = (
            f"no sharding rule for {step.where}: it is computed whole on every rank of axis {self.axis!r}. "
            f"Give it one with fp.register_rule({origin_of(step.node.target)}, '… -> …')"
        )
        if _is_split(step):
            if self.strict:
                raise PartitionError(message)
            warn_at(source_of(step.node), message, PartitionWarning)
        return _COMPUTE_REPLICATED

    def _arguments(
        self, node: fx.Node, operands: list[fx.Node], decision: OpSharding, whole: TargetLayout, completed: bool = False
    ) -> tuple[Any, Any]:
        """Return the arguments of a node with each tensor converted to the layout that the decision requires.

        Replicated operands are converted to the layout `whole`. With `completed`, Reduced operands become
        Invariant.
        """
        remaining = enumerate(zip(operands, decision.operands, strict=True))

        def visit(leaf: fx.node.Argument) -> torch.Tensor | fx.node.Argument:
            if not isinstance(leaf, fx.Node):
                return leaf
            index, (operand, required) = next(remaining)
            if completed and self.values[operand].place == REDUCED:
                return self._replicated(self.values[operand])
            part = self._in_form(operand, whole if isinstance(required, (Replicated, Reduced)) else required)
            return mask_duplicates(part, required, self.axis, self.cut) if index in decision.masked else part

        converted: tuple[Any, Any] = walk_args((node.args, node.kwargs), visit)
        return converted

    def _in_form(self, node: fx.Node, form: TargetLayout) -> torch.Tensor:
        node = self.stands_for.get(node, node)
        value: PartitionedValue = self.values[node]
        if form == value.place:
            return value.part
        held_whole = isinstance(value.place, (Replicated, Reduced))
        is_kept = not (isinstance(form, Shard) or form == PARTIAL or info(node).aval.is_differentiable)
        if held_whole and (form == REPLICATED or is_kept):
            return value.part
        if isinstance(form, Owned) and (held_whole or REPLICATED in value.forms):
            return value.forms.get(REPLICATED, value.part)
        if form not in value.forms:
            if isinstance(form, Shard) and isinstance(value.place, (Replicated, Owned)):
                value.forms[form] = self._sliced(node, value, form)
            else:  # attribute the psum of partial sums to the op that left them
                with at_source(implied_source(node) if value.place == PARTIAL else current_source()):
                    value.forms[form] = self._converted(value, form)
        return value.forms[form]

    def _replicated(self, value: PartitionedValue) -> torch.Tensor:
        """Complete partial sums, or convert a Reduced value to Invariant, once for all ops that need it."""
        if REPLICATED not in value.forms:
            value.forms[REPLICATED] = convert(value.part, value.place, REPLICATED, self.axis, self.cut)
        return value.forms[REPLICATED]

    def _converted(self, value: PartitionedValue, form: TargetLayout) -> torch.Tensor:
        if form == REPLICATED_VARYING and value.place == PARTIAL:  # one psum for all ops that read the full value
            return convert(self._replicated(value), REPLICATED, REPLICATED_VARYING, self.axis, self.cut)
        return convert(value.part, value.place, form, self.axis, self.cut)

    def _sliced(self, node: fx.Node, value: PartitionedValue, form: Shard) -> torch.Tensor:
        """Compute a slice of a replicated value from slices of the operands of its op.

        Slicing the value itself would gather its gradient. For a broadcast parameter, for example, only the sum of the
        gradient of the parameter is needed. The full value is then dead code, unless another op uses it.
        """
        is_op = node.op == "call_function" and node.target is not operator.getitem
        self.sliced.append(node)
        if is_op and not all(operand in self.values for operand in tensor_operands(node)):
            raise _InsideCopyError(self.form_of[node])
        source = _split_backwards(self._step(node), form) if is_op else None
        if source is None:
            return self._converted(value, form)
        step, rule = source
        args, kwargs = self._arguments(node, tensor_operands(node), step.decision, REPLICATED_VARYING)
        with at_source(implied_source(node)), grad_mode_of(node):
            return rule.local(step, *args, **kwargs) if rule.local else step.run(*args, **kwargs)

    def _step(self, node: fx.Node) -> OpContext:
        operands = [self._operand(operand) for operand in tensor_operands(node)]
        if any(operand.place == PARTIAL for operand in operands):
            pairs = zip(operands, tensor_operands(node), strict=True)
            operands = [replace(known, is_zero=known.place == REPLICATED and is_zero(each)) for known, each in pairs]
        return OpContext(node, self.axis, self.cut, operands, list(info(node).results), eval_node, owner=self.owner)

    def _store(self, node: fx.Node, step: OpContext, outputs: PyTree, alone: bool) -> None:
        static = bool(step.operands) and all(operand.is_parameter for operand in step.operands)
        parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        if step.decision.extremum:
            parts = [_over_ranks(step.decision.extremum, part, self.axis) for part in parts]
        results = step.decision.results
        if step.is_on_owner and self.owner is not None:
            results = tuple(self.owner if place == REPLICATED else place for place in results)
        places = zip(results, parts, strict=True)
        fixed = all(operand.is_constant for operand in step.operands)
        values = [PartitionedValue(place, part, static, is_constant=fixed, is_alone=alone) for place, part in places]
        self.hold(node, values if isinstance(info(node).val, tuple) else values[0])

    def results(
        self, outputs: list[fx.node.Argument], wanted: Sequence[AxisLayout | None] | None
    ) -> tuple[list[PyTree], list[AxisLayout]]:
        parts: list[PyTree] = []
        places: list[AxisLayout] = []
        for index, output in enumerate(outputs):
            if not isinstance(output, fx.Node):
                parts.append(output)
                places.append(REPLICATED)
                continue
            held = self.values[output].place
            place = wanted[index] if wanted is not None else None
            place = place if place is not None else self._result_place(held)
            with at_source(implied_source(output)):
                parts.append(self._result(output, place))
            places.append(place)
        return parts, places

    def _result_place(self, held: AxisLayout) -> AxisLayout:
        if self.owner is not None:
            return held if held == REPLICATED else self.owner
        return REPLICATED if held in (PARTIAL, REDUCED) else held

    def _result(self, output: fx.Node, place: AxisLayout) -> torch.Tensor:
        value: PartitionedValue = self.values[output]
        if value.place == REDUCED and place == REPLICATED:
            if info(output).aval.is_differentiable:
                return convert(value.part, REDUCED, REPLICATED, self.axis, self.cut)
            return value.part.clone()  # a parameter: results without a gradient are replicated
        return self._in_form(output, place)


def _is_split(step: OpContext) -> bool:
    return any(not isinstance(operand.place, (Replicated, Reduced)) for operand in step.operands)


def _is_reduced(step: OpContext) -> bool:
    free = step.decision.varying or step.decision.of_shapes
    return not free and any(isinstance(operand.place, Reduced) for operand in step.operands)


def _reduced(result: Aval | None) -> AxisLayout:
    return REDUCED if result is not None and result.is_differentiable else REPLICATED


def _decision(rule: Rule, step: OpContext) -> OpSharding:
    decision = rule.decide(step) if rule.decide is not None else None
    if decision is None:
        text = rule.text_for(step.node)
        decision = choose_sharding(text, step.operands, step.results, step.parts, step.where, rule.counts)
    return decision


def _whole(step: OpContext) -> OpSharding:
    return OpSharding((REPLICATED,) * len(step.operands), (REPLICATED,) * len(step.results))


_COMPUTE_REPLICATED = Rule(decide=_whole)


def _over_ranks(extremum: str, part: torch.Tensor, axis: str) -> torch.Tensor:
    combine = fp.pmax if extremum == "pmax" else fp.pmin
    best = combine(part.detach(), axis)
    if not is_trained(part):
        return best
    holds = part == best
    share = holds.to(part.dtype) / fp.pvary(fp.psum(holds.to(part.dtype), axis), axis)
    return best + fp.psum(torch.where(holds & part.isfinite(), part - best, 0) * share, axis)


# --- Slices of operands that give a slice of the result: the rule of an op, read from right to left ---


def _split_backwards(step: OpContext, form: Shard) -> tuple[OpContext, Rule] | None:
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
    text = rule.text_for(step.node)
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
