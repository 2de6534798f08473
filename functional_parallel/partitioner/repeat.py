"""Repeat the recorded ops of a copy, with their derivative.

Under a gradient, a repeated copy is one `autograd.Function` that repeats the forward ops, and later the backward ops.
The first backward of a body is recorded when it is needed: the copy runs again on a separate level, and its forward ops
are exchanged for those that were repeated.

The gradients of a value are added in the order of a backward that runs op by op. A value that later ops read too is
therefore also a result of the Function. Its gradient from there is then the first summand inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch
from ..checker import Typing
from ..collectives import restored, snapshot
from ..ir import Copy, Rename, Source, Template, argument, explicit_casts, has_slices_of, info, slices_of, update_info
from ..rules import Shard
from ..tracing import Recorder, recorder
from .copies import FoundValues, Interpreter, Made, TakenValues, is_repeatable, observed, reads_only, recorded
from .values import numbered


class CopyRunner:
    """Run the copies of the bodies of one graph."""

    def __init__(self, run: Interpreter, active: Recorder, by_op: Collection[int], is_repeating: bool) -> None:
        self.run, self.active, self.by_op, self.is_repeating = run, active, by_op, is_repeating
        self.bodies: dict[Hashable, _Body | None] = {}
        self._numbers: dict[int, tuple[int, Iterator[int]]] = {}  # by form: of the body, and of its copies

    @classmethod
    def of(cls, run: Interpreter, by_op: Collection[int], *, is_repeating: bool = True) -> CopyRunner | None:
        """Return a runner for the active trace, or None.

        It only numbers the copies whose form is in `by_op`, and all copies where they cannot be repeated.
        """
        active = recorder()
        return None if active is None else cls(run, active, by_op, is_repeating and is_repeatable(active))

    def __call__(self, copy: Copy) -> None:
        """Run a copy, or repeat another copy. Note the numbers of body and copy at its ops."""
        with recorded(self.active) as nodes:
            self._run(copy)
        number = self._number(copy)
        for node in nodes:
            update_info(node, copy=number)

    def _number(self, copy: Copy) -> tuple[int, int]:
        if copy.form not in self._numbers:
            bodies: Iterator[int] = self.active.notes.setdefault("bodies", itertools.count())
            self._numbers[copy.form] = next(bodies), itertools.count()
        body, copies = self._numbers[copy.form]
        return body, next(copies)

    def _run(self, copy: Copy) -> None:
        is_repeating = self.is_repeating and copy.form not in self.by_op
        taken = TakenValues.of(copy, self.run, self.active) if is_repeating else None
        body = None if taken is None else self.bodies.get(taken.key)
        if taken is not None and taken.key not in self.bodies:
            self.bodies[taken.key] = self._first(copy, taken)
        elif taken is None or body is None or not body.repeat(self.run, copy, taken):
            self._visit(copy)

    def _visit(self, copy: Copy) -> None:
        for node in copy.nodes:
            self.run.visit(node)

    def _is_cut(self, node: fx.Node) -> bool:
        """Whether an op takes a slice along a dim that is sharded."""
        place = self.run.values[node.args[0]].place if slices_of([node]) else None
        return isinstance(place, Shard) and place.dim == argument(node, "dim") % info(node.args[0]).aval.ndim

    def _first(self, copy: Copy, taken: TakenValues) -> _Body | None:
        known, sliced = [dict(value.forms) for value in taken.values], len(self.run.sliced)
        since = _torch.next_node_number()
        with recorded(self.active) as nodes:
            self._visit(copy)
        found = FoundValues.of(copy, self.run, taken, known)
        outside = [self.active.value(_torch.unwrap(tensor)) for tensor in taken.tensors]
        made = [Made.of(tensor, self.active) for tensor in found.tensors]
        is_known = {*nodes, *outside}.difference([None])
        cut = [index for index, node in enumerate(copy.externals) if node in self.run.sliced[sliced:]]
        if found.has_others or _has_op(copy, cut):
            return None  # other values were read, and values outside are computed from them
        if not reads_only(nodes, [*nodes, *outside]) or any(each.node not in is_known for each in made):
            return None
        trained = [taken.tensors[index] for index in taken.trained]
        sources = [
            {taken.trained[index] for index in _torch.sources_of_gradients(tensor, trained, since)}
            for tensor in found.tensors
        ]
        has_slices = slices_of(nodes) == slices_of(copy.nodes) and not any(map(self._is_cut, copy.nodes))
        return _Body(self.active, copy, Template(nodes), outside, found, made, sources, cut, has_slices)


@dataclass(eq=False)
class _Body:
    """Ops of the first copy of a body, with its results, and the backwards that are known."""

    active: Recorder
    copy: Copy
    ops: Template
    outside: list[fx.Node | None]  # for each tensor from outside, its node
    found: FoundValues
    made: list[Made]
    sources: list[set[int]]  # for each result, numbers of the tensors from outside that get a gradient from it
    cut: list[int]  # numbers of the external nodes with a computed slice
    has_slices: bool  # whether the ops take the slices that the copy takes, in order
    backwards: dict[Hashable, _Backward | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reads = dict.fromkeys(operand for node in self.ops.nodes for operand in node.all_input_nodes)
        reads.update((each.node, None) for each in self.made if each.node is not None)
        numbers = {node: index for index, node in reversed(list(enumerate(self.outside))) if node is not None}
        self.read = [numbers[node] for node in reads if node in numbers]  # in the order of their first use

    def repeat(self, run: Interpreter, copy: Copy, taken: TakenValues) -> bool:
        """Repeat the ops for another copy. Return False if its source lines or its slices do not allow it."""
        lines = _lines(self.copy, copy)
        has_slices = self.has_slices or slices_of(copy.nodes) == slices_of(self.copy.nodes)
        if lines is None or _has_op(copy, self.cut) or not has_slices:
            return False
        call = _RepeatedCopy(self, run.fork(), copy, taken, lines)
        outputs = iter(_Repeat.apply(call, *call.trained) if call.sources else call.forward())  # type: ignore[no-untyped-call]
        tensors: list[Any] = list(taken.tensors)
        for index in range(len(self.made)):
            is_output = index in call.results and self.made[index].has_gradient
            tensors.append(next(outputs) if is_output else call.results.get(index))
        exchanged = {id(taken.tensors[index]): next(outputs) for index in call.later}
        for value in taken.values if exchanged else ():
            run.held.exchange(value, exchanged)
        tensors[: len(taken.tensors)] = [exchanged.get(id(tensor), tensor) for tensor in taken.tensors]
        values = [*taken.values, *(each.value(tensors) for each in self.found.described)]
        for number, form, tensor in call.forms:
            values[number].forms[form] = tensors[tensor]
        for position, numbers in zip(copy.escapes, self.found.of_escapes, strict=True):
            run.hold(copy.nodes[position], numbered(values, numbers))
        call.taken = replace(taken, values=[])  # they have the results: a cycle that is not collected
        return True


@dataclass(eq=False)
class _Backward:
    """Recorded backward ops of one copy."""

    copy: Copy
    forward: list[fx.Node]
    outside: list[fx.Node | None]
    ops: Template
    cotangents: list[fx.Node | None]
    made: Sequence[Made | None]  # gradients


class _RepeatedCopy:
    """One repeated copy: its forward ops, and what its backward needs."""

    nodes: list[fx.Node]
    outside: list[fx.Node | None]
    results: dict[int, Tensor]  # by number

    def __init__(self, body: _Body, run: Interpreter, copy: Copy, taken: TakenValues, lines: _Lines) -> None:
        self.body, self.active, self.run = body, body.active, run
        self.copy, self.taken, self.lines, self.environment = copy, taken, lines, snapshot()
        read_later, first = taken.read_later(copy), len(taken.tensors)
        self.forms, kept = body.found.kept(read_later)
        self.kept = [index for index in range(len(body.made)) if first + index in kept]
        self.sources = sorted(set[int]().union(*(body.sources[index] for index in self.kept)))
        later = {number for value in read_later for number in taken.described[value].tensors}
        self.trained = [taken.tensors[index] for index in self.sources]
        self.later = [index for index in self.sources if index in later]  # are results too

    def forward(self) -> tuple[Tensor, ...]:
        """Repeat the forward ops. Return the results with a gradient, then the values from outside for later ops."""
        body, active = self.body, self.active
        self.outside = [None] * len(body.outside)
        for index in body.read:
            self.outside[index] = active.node_of(_torch.unwrap(self.taken.tensors[index]))
        slices = slices_of(self.copy.nodes) if body.has_slices else []
        copies = self._repeated(body.ops, _pairs(body.outside, self.outside), self.lines, slices)
        self.nodes = [copies[node] for node in body.ops.nodes]
        self.results = {index: body.made[index].again(active, copies) for index in self.kept}
        found = [x for index, x in self.results.items() if body.made[index].has_gradient]
        return *found, *(Made.of(self.taken.tensors[index], active).again(active, {}) for index in self.later)

    def backward(self, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the tensors from outside that have one."""
        given = [None if each is None else _torch.unwrap(each) for each in cotangents]
        nodes = [None if each is None else self.active.node_of(each) for each in given]
        roles: dict[fx.Node | None, Hashable] = {None: None, **{node: index for index, node in enumerate(self.nodes)}}
        roles.update((node, ("outside", index)) for index, node in enumerate(self.outside) if node is not None)
        same = tuple(roles.setdefault(node, ("cotangent", index)) for index, node in enumerate(nodes))
        looks = tuple(None if each is None else observed(each, self.active) for each in given)
        key = (tuple(self.kept), tuple(self.later), same, looks)
        known = self.body.backwards.get(key)
        lines = None if known is None else _lines(known.copy, self.copy)
        if known is None or lines is None:
            gradients, self.body.backwards[key] = self._record(given, nodes)
            return gradients
        pairs = dict(zip(known.forward, self.nodes, strict=True))
        pairs.update(_pairs([*known.outside, *known.cotangents], [*self.outside, *nodes]))
        copies = self._repeated(known.ops, pairs, lines)
        self._note_copy(copies[node] for node in known.ops.nodes)
        same_as = {node: tensor for node, tensor in zip(nodes, given, strict=True) if tensor is not None}
        return [None if each is None else self._gradient(each, copies, same_as) for each in known.made]

    def _gradient(
        self, made: Made, copies: Mapping[fx.Node, fx.Node], cotangents: Mapping[fx.Node | None, Tensor]
    ) -> Tensor:
        assert made.node is not None
        found = cotangents.get(copies.get(made.node, made.node))
        return made.again(self.active, copies) if found is None else found

    def _repeated(
        self, ops: Template, pairs: Mapping[fx.Node, fx.Node], lines: _Lines, slices: Sequence[Any] = ()
    ) -> Mapping[fx.Node, fx.Node]:
        copies = ops.stamp(self.active.traced, pairs, _rename(lines), slices)
        if isinstance(self.active.on_node, Typing) and self.active.on_node.then is not None:
            for node in ops.nodes:
                self.active.on_node.then(copies[node])
        return copies

    def _note_copy(self, backward: Iterable[fx.Node]) -> None:
        number = info(self.nodes[0]).copy if self.nodes else None
        for node in backward:
            update_info(node, copy=number)

    # --- The first backward of a body ---

    def _record(
        self, given: Sequence[Tensor | None], cotangents: list[fx.Node | None]
    ) -> tuple[list[Tensor | None], _Backward | None]:
        """Record the backward of this copy. It runs the copy again, to find the derivatives of its ops."""
        active = self.active
        plain = [_torch.unwrap(self.taken.tensors[index]) for index in self.taken.trained]
        with restored(self.environment), active.inside_backward(), _torch.gradient_level(plain) as leaves:
            with recorded(active) as again, explicit_casts():
                results = self._run_again(leaves)
            pairs = [(x, one) for x, one in zip(results, given, strict=True) if one is not None]
            with recorded(active) as nodes:
                outputs, gradients = [x for x, _ in pairs], [one for _, one in pairs]
                wanted = [leaves[self.taken.trained.index(index)] for index in self.sources]
                raw = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            found: list[Any] = [None if each is None else _torch.unwrap(each) for each in raw]
        if not _same_ops(again, self.nodes):
            return found, None  # correct, with some ops twice
        self._note_copy(nodes)
        exchanged = dict(zip(again, self.nodes, strict=True))
        _exchange(active, exchanged, nodes)
        made = [None if each is None else _exchanged(Made.of(each, active), exchanged) for each in found]
        known = [*nodes, *self.nodes, *self.outside, *cotangents]
        for index, each in enumerate(made):
            if each is not None and active.value(found[index]) is not each.node:
                found[index] = each.again(active, {})
        is_known = reads_only(nodes, known) and all(each is None or each.node in known for each in made)
        if not is_known or not has_slices_of(nodes, set(self.nodes)):
            return found, None
        return found, _Backward(self.copy, self.nodes, self.outside, Template(nodes), cotangents, made)

    def _run_again(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Run the copy op by op on tensors with a gradient. Return what `forward` returns."""
        taken, run = self.taken, self.run
        tensors = [_torch.unwrap(tensor) for tensor in taken.tensors]
        for index, leaf in zip(taken.trained, leaves, strict=True):
            tensors[index] = leaf
        values = [each.value(tensors) for each in taken.described]
        for node, numbers in zip(self.copy.externals, taken.of_nodes, strict=True):
            run.values[node] = numbered(values, numbers)
        known = [dict(value.forms) for value in values]
        for node in self.copy.nodes:
            run.visit(node)
        found = FoundValues.of(self.copy, run, replace(taken, values=values, tensors=tensors), known)
        results = [found.tensors[index] for index in self.kept if self.body.made[index].has_gradient]
        return results + [tensors[index] for index in self.later]


class _RepeatContext(_torch.FunctionContext):
    call: _RepeatedCopy


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(call: _RepeatedCopy, *trained: Tensor) -> tuple[Tensor, ...]:
        return call.forward()

    @staticmethod
    def setup_context(ctx: _RepeatContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: _RepeatContext, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.backward(cotangents)


def _has_op(copy: Copy, externals: Sequence[int]) -> bool:
    return any(copy.externals[index].op == "call_function" for index in externals)


def _pairs(first: Sequence[fx.Node | None], other: Sequence[fx.Node | None]) -> dict[fx.Node, fx.Node]:
    return {a: b for a, b in zip(first, other, strict=True) if a is not None and b is not None}


def _same_ops(again: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> bool:
    pairs = zip(again, nodes, strict=False)
    return len(again) == len(nodes) and all(a.target is b.target and info(a).val == info(b).val for a, b in pairs)


def _exchange(active: Recorder, exchanged: Mapping[fx.Node, fx.Node], readers: Sequence[fx.Node]) -> None:
    """Let ops read other nodes, and erase the nodes that they read before."""
    for node, other in exchanged.items():
        node.replace_all_uses_with(other)
    for node in readers:
        forward = info(node).forward_node
        if forward in exchanged:
            update_info(node, forward_node=exchanged[forward])
    for node in reversed(exchanged):
        active.traced.graph.erase_node(node)


def _exchanged(made: Made, exchanged: Mapping[fx.Node, fx.Node]) -> Made:
    return made if made.node is None else replace(made, node=exchanged.get(made.node, made.node))


# --- Source lines ---


_Lines = dict[Any, Any]  # source lines of the ops of a copy with their stages, by the lines of another copy


def _lines(first: Copy, other: Copy) -> _Lines | None:
    """Return the source lines of a copy by the lines of the first. None if one line has several counterparts."""
    found: _Lines = {}
    pairs = zip((*first.nodes, *first.externals), (*other.nodes, *other.externals), strict=True)
    for mine, theirs in ((_line(a), _line(b)) for a, b in pairs):
        if found.setdefault(mine, theirs) != theirs or (mine is None) != (theirs is None):
            return None
    return found


def _line(node: fx.Node) -> tuple[Source, int] | None:
    source = info(node).source
    return None if source is None else (source, source.stage)


def _rename(lines: _Lines) -> Rename | None:
    def renamed(source: Source) -> Source:
        found = lines.get((source, source.stage))
        return source if found is None else replace(found[0], implied=source.implied)

    return renamed if any(line != other for line, other in lines.items()) else None
