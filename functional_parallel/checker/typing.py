"""Infer the type of each node of a traced local program when it is recorded.

An ordinary op does not need a typing rule. Its result has the union of the states of its operands. An Invariant operand
that is combined with a Varying one is treated as cast (`pvary`). Only ops that accept partial sums are declared, by the
marks `~` and `&` of their sharding rules. Any other op on an Unreduced value is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from sharding_specs import P

from ..collectives import CollectiveCall, State, Type, dual, result_type
from ..errors import CollectiveTypeError, TypingError
from ..ir import (
    VIEWS,
    Aval,
    casts_are_explicit,
    collective_call,
    info,
    operands_of,
    primitive_name,
    reached,
    source_of,
    tensor_operands,
    update_info,
)
from ..rules import lookup

aten = torch.ops.aten

_V, _I, _U, _R, _O = State.VARYING, State.INVARIANT, State.UNREDUCED, State.REDUCED, State.OWNED

#: zeros with the layout of a value, as its tangent, and a copy over them: no value of the first operand is left
_OF_THE_SECOND = {aten._new_zeros_with_same_feature_meta.default, aten.copy.default}

_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_FILL_VALUE = {aten.full.default: 1, aten.scalar_tensor.default: 0}  # position of the number
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.mul.Tensor, aten.mul.Scalar}
_KEEPS_ZEROS = VIEWS | {
    *(aten._to_copy.default, aten.neg.default, aten.div.Tensor, aten.sum.default, aten.sum.dim_IntList)
}
_GRADIENTS_OF_VIEWS = {  # linear; a forward derivative of a backward records them as ordinary ops
    *(aten.slice_backward.default, aten.select_backward.default),
    *(aten.diagonal_backward.default, aten.unfold_backward.default),
}
_FILLED = {  # with a value that is not a partial sum, even if their operand is one
    *(aten.ones_like.default, aten.full_like.default),
    *(aten.new_ones.default, aten.new_full.default),
}


class Typing:
    """Infer the type of every node of a graph, in order, and call `then` with it. `axes` are sizes of mesh axes."""

    def __init__(self, axes: dict[str, int], then: Callable[[fx.Node], None] | None = None) -> None:
        self.axes, self.then = axes, then
        self._known: dict[Type, Type] = {}  # one object for all equal types

    def __call__(self, node: fx.Node) -> None:
        found = self._infer(node)
        update_info(node, type=self._known.setdefault(found, found))
        if self.then is not None:
            self.then(node)

    def _infer(self, node: fx.Node) -> Type:
        if node.target is operator.getitem:
            return _of_gradient(node, type_of(node.args[0]))
        if (call := collective_call(node)) is not None:
            return self._primitive(call, node)
        if node.target in _OF_THE_SECOND:
            return type_of(node.args[1])
        if node.target is aten.zeros.default and info(node).forward_node is not None:  # a derivative that is 0
            return dual(type_of(info(node).forward_node))
        types = [type_of(operand) for operand in tensor_operands(node)]
        self._refuse_missed_casts(node)
        mixed = False
        states = {}
        for axis in (axis for axis in self.axes if any(axis in type_ for type_ in types)):
            held = [type_[axis] for type_ in types]
            if node.target in _FILLED:
                held = [_I if state is _U else state for state in held]
            states[axis] = self._union(node, axis, held)
            mixed |= any(state is not states[axis] for state in held)
        if mixed and not casts_are_explicit():
            update_info(node, implicit_cast=True)
        return _of_gradient(node, Type(states))

    def _primitive(self, call: CollectiveCall, node: fx.Node) -> Type:
        operand = Type() if call.operand is None else type_of(call.operand)
        try:
            return result_type(call.kind, operand, call.axes, **call.states)
        except CollectiveTypeError as error:
            raise TypingError(f"{_where(node)}: {error}") from None

    def _union(self, node: fx.Node, axis: str, held: Sequence[State]) -> State:
        if _O in held:
            return self._with_owned(node, axis, held)
        if _U in held:
            return self._with_partial_sums(node, axis, held)
        return _V if _V in held else _R if _R in held else _I

    def _with_owned(self, node: fx.Node, axis: str, held: Sequence[State]) -> State:
        others = {state for state in held if state not in (_O, _I)}
        if others:
            raise TypingError(
                f"{_where(node)}: a value that one rank along {axis!r} holds (Owned) meets one that is "
                f"{min(others).name.capitalize()}; broadcast the first to all ranks, or gather the second"
            )
        return _O

    def _with_partial_sums(self, node: fx.Node, axis: str, held: Sequence[State]) -> State:
        marks, operands = _linear_marks(node), tensor_operands(node)
        together = [index for index, mark in enumerate(marks) if mark == "&"]
        held = [_U if index in together and is_zero(operands[index]) else state for index, state in enumerate(held)]
        partial = [index for index, state in enumerate(held) if state is _U]
        if _V in held:
            raise TypingError(
                f"{_where(node)}: partial sums (Unreduced over {axis!r}) meet a value that varies by rank; "
                f"write fp.psum(x, {axis!r}) on the partial sums first"
            )
        if together and partial == together:
            return _U
        if len(held) > len(partial) and all(is_zero(operands[i]) and marks[i] != "~" for i in partial):
            rest = [state for state in held if state is not _U]  # a value put into zeros keeps its type
            return self._union(node, axis, rest)
        if node.target in _ZEROS:
            return _U  # zeros of all ranks sum to zeros: a tangent of a constant gradient
        if len(partial) == 1 and (marks[partial[0]] == "~" or info(node).backward):
            return _U  # a backward op is linear in its gradient, the only partial sum that reaches it
        raise TypingError(
            f"{_where(node)}: {node.target} is not linear in a value that is Unreduced over {axis!r} (the ranks hold "
            f"partial sums), so the sum of its results is not its result of the sum; write fp.psum(x, {axis!r}) first"
        )

    def _refuse_missed_casts(self, node: fx.Node) -> None:
        forward = info(node).forward_node
        if forward is None or not info(forward).implicit_cast:
            return
        raise TypingError(
            f"{_where(forward)}: a torch.func derivative of an op where an invariant value meets one that varies lacks "
            "the sum over ranks. Use fp.grad (fp.grad_and_value, fp.hessian), or write fp.pvary on the invariant value"
        )


def type_of(node: fx.Node) -> Type:
    return info(node).type or Type()


def since(node: fx.Node, axis: str) -> str:
    state = type_of(node)[axis]
    same = reached([node], lambda each: (operand for operand in operands_of(each) if type_of(operand)[axis] is state))
    first = next((each for each in node.graph.nodes if each in same and source_of(each) is not None), None)
    if first is None or state is _I:
        return ""
    read = [info(operand).path for operand in operands_of(first) if operand in same and operand.op == "placeholder"]
    reads = f", which reads argument {' and '.join(filter(None, read))}" if any(read) else ""
    return f". It is {state} along {axis!r} since {_where(first)}{reads}"


def mismatch(axis: str, held: State, wanted: State, spec: P, output: fx.Node) -> str:
    # With its origin: the line since which it is in that state.
    fixes = {
        (_V, _I): f"differs by rank along {axis!r}, but {spec!r} says that all ranks hold the same; "
        f"a missing psum? write fp.psum(x, {axis!r}) or mention {axis!r} in the spec",
        (_I, _V): f"is the same on all ranks along {axis!r}, but {spec!r} says that it is sharded; "
        f"leave {axis!r} out of the spec, or write fp.pscatter(x, {axis!r}) or fp.pvary(x, {axis!r})",
        (_U, _I): f"holds partial sums along {axis!r}, but {spec!r} does not say so; "
        f"write fp.psum(x, {axis!r}) or P(…, unreduced={{{axis!r}}})",
        (_O, _I): f"is held by one rank along {axis!r}, but {spec!r} says that all ranks hold it; "
        f"write P(…, owner={{{axis!r}: rank}})",
    }
    fix = fixes.get((held, wanted), f"is {held} along {axis!r}, but {spec!r} says {wanted}")
    return fix + since(output, axis)


def _of_gradient(node: fx.Node, found: Type) -> Type:
    """Replace Reduced by Invariant in the type of a value without a gradient, such as integers."""
    value = info(node).val
    if _R not in found.values() or not isinstance(value, Aval) or value.is_differentiable:
        return found
    return Type({axis: _I if state is _R else state for axis, state in found.items()})


def casts_of(node: fx.Node) -> list[tuple[int, str, State, State]]:
    """Return the implied casts (operand, axis, from, to) of an ordinary op: states that differ from the result's."""
    result = type_of(node)
    casts = []
    for index, operand in enumerate(tensor_operands(node)):
        held = type_of(operand)
        if node.target in _FILLED:
            continue  # it reads only the shape of its operand
        for axis in result:
            if held[axis] is _U and is_zero(operand):
                continue
            target = _R if result[axis] is _U and held[axis] is _I and not is_zero(operand) else result[axis]
            if (held[axis], target) in ((_R, _I), (_I, _O)):
                continue  # the result has no gradient; what the owner computes with needs no cast
            if held[axis] is not target and target is not _U:
                casts.append((index, axis, held[axis], target))
    return casts


def _linear_marks(node: fx.Node) -> list[str]:
    count = len(tensor_operands(node))
    rule = lookup(node.target)
    if rule is None:
        return ["~" if node.target in _GRADIENTS_OF_VIEWS else ""] * count
    if rule.text is None:
        return ["~" if rule.moves_only else ""] * count
    return [pattern.linear for pattern in rule.text_for(node).operands]


def is_zero(node: fx.Node, depth: int = 16) -> bool:
    """Whether a value is all zeros. The zeros of all ranks sum to zeros, so they combine with partial sums uncast."""
    # At most `depth` ops are traced back: products with zeros, and ops that move, sum or cast zeros.
    level = {node}
    for _ in range(depth + 1):
        if any(map(_makes_zeros, level)):
            return True
        level = {source for each in level for source in _whose_zeros_it_keeps(each)}
    return False


def _makes_zeros(node: fx.Node) -> bool:
    filled = _FILL_VALUE.get(node.target)
    return node.target in _ZEROS or (filled is not None and node.args[filled] == 0)


def _whose_zeros_it_keeps(node: fx.Node) -> list[fx.Node]:
    if node.target in _PRODUCTS:
        return [each for each in node.args[:2] if isinstance(each, fx.Node)]
    keeps = node.target in _KEEPS_ZEROS or primitive_name(node) == "pcast"
    return operands_of(node)[:1] if keeps else []


def _where(node: fx.Node) -> str:
    source = source_of(node)
    return f"{source}: `{source.text}`" if source is not None else str(node.target)
