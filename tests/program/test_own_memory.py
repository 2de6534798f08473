"""What may be written over, or left where it lies: only what nobody else can see."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
from torch import fx, ops

from functional_parallel.ir import update_info
from functional_parallel.ops.adamw_kernel import ADAMW_IN_PLACE
from functional_parallel.ops.packing import PACK
from functional_parallel.program.aliasing import is_only_use_of_own_memory, may_stay_in_place

aten = ops.aten
Call = Callable[..., fx.Node]

OWN: dict[str, Callable[[Call, fx.Node], fx.Node]] = {
    "what was computed": lambda call, x: call(aten.mm.default, x, x),
    "a view of it": lambda call, x: call(aten.view.default, call(aten.sum.dim_IntList, x, [0], True), [6]),
    "a view of a view": lambda call, x: call(
        aten.t.default, call(aten.view.default, call(aten.mm.default, x, x), [2, 3])
    ),
    "a cast of its type": lambda call, x: call(ops.fp.pcast.default, call(aten.mm.default, x, x), ["data"], "i", "v"),
    "one of several results": lambda call, x: call(
        getitem, call(aten.native_layer_norm_backward.default, x, x, [6], x, x, None, None, [True, True, True]), 1
    ),
    "what products were added to": lambda call, x: call(aten.addmm_.default, call(aten.mm.default, x, x), x, x),
}
NOT_OWN: dict[str, Callable[[Call, fx.Node], fx.Node]] = {
    "an input": lambda call, x: x,
    "a view of an input": lambda call, x: call(aten.t.default, x),
    "an input that was written to": lambda call, x: call(aten.addmm_.default, x, x, x),
    "a part of what was cut": lambda call, x: call(getitem, call(aten.split.Tensor, call(aten.mm.default, x, x), 3), 0),
    "what may be its operand": lambda call, x: call(aten._to_copy.default, call(aten.mm.default, x, x)),
}


def operand(make: Callable[[Call, fx.Node], fx.Node]) -> tuple[fx.Graph, fx.Node]:
    """What is made, summed, in a graph that ends there."""
    graph = fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    made = make(call, graph.placeholder("x"))
    graph.output(call(ops.fp.psum.default, made, ["data"], "varying"))
    return graph, made


@pytest.mark.parametrize("what", OWN)
def test_what_may_be_written_over(what: str) -> None:
    assert is_only_use_of_own_memory(operand(OWN[what])[1])


@pytest.mark.parametrize("what", NOT_OWN)
def test_what_may_not(what: str) -> None:
    assert not is_only_use_of_own_memory(operand(NOT_OWN[what])[1])


@pytest.mark.parametrize("what", [what for what in OWN if what != "one of several results"])
def test_what_somebody_else_reads_may_not(what: str) -> None:
    """The value itself, or any that it is a view of."""
    graph, made = operand(OWN[what])
    read: fx.Node | None = made
    while read is not None and read.op == "call_function":
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            reader = graph.call_function(aten.sin.default, (read,))
        assert not is_only_use_of_own_memory(made), read
        graph.erase_node(reader)
        assert is_only_use_of_own_memory(made)
        is_fresh = read.target in (aten.mm.default, aten.sum.dim_IntList)
        read = None if is_fresh else read.args[0]  # type: ignore[assignment]


def updated(call: Call, part: fx.Node) -> fx.Node:
    """The part after an update in place, of which its moments are given by others."""
    held = [part, *(call(aten.zeros.default, [3]) for _ in range(2))]
    return call(getitem, call(ADAMW_IN_PLACE, held, [held[1]], held[1], held[2], 0.9, 0.99, 1e-8, 0.0), 0)


STAYS: dict[str, Callable[[Call, fx.Node], fx.Node]] = {
    "what is computed with": lambda call, part: call(aten.mul.Tensor, part, part),
    "what is updated and packed": lambda call, part: call(PACK, [updated(call, part)], 1, [0]),
    "what is updated and gathered": lambda call, part: call(
        ops.fp.all_gather.default, updated(call, part), ["data"], 0, "invariant"
    ),
}
IS_COPIED: dict[str, Callable[[Call, fx.Node], fx.Node]] = {
    "what is returned": lambda call, part: part,
    "what is looked at": lambda call, part: call(aten.view.default, part, [3]),
    "what is packed": lambda call, part: call(PACK, [part], 1, [0]),
    "what is sent": lambda call, part: call(ops.fp.ppermute.default, part, ["data"], [0, 1]),
    "what is updated and returned": updated,
    "what is updated and computed with": lambda call, part: call(aten.neg.default, updated(call, part)),
    "what an op returns that writes it": lambda call, part: call(aten.add_.Tensor, part, part),
}


def part_of(kind: str, use: Callable[[Call, fx.Node], fx.Node]) -> fx.Node:
    """A slice of an input, or of a cast of it, in a graph that uses it and ends there."""
    graph = fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    whole = graph.placeholder("x")
    update_info(whole, is_parameter=kind != "input")
    if kind == "cast":
        whole = call(ops.fp.pcast.default, whole, ["data"], "invariant", "reduced")
    if kind == "computed":
        whole = call(aten.neg.default, whole)
    part = call(ops.fp.pscatter.default, whole, ["data"], 0)
    graph.output(use(call, part))
    return part


@pytest.mark.parametrize("kind", ["parameter", "cast"])
@pytest.mark.parametrize("use", STAYS)
def test_a_slice_of_a_parameter_that_stays_where_it_lies(use: str, kind: str) -> None:
    assert may_stay_in_place(part_of(kind, STAYS[use]))


@pytest.mark.parametrize("use", IS_COPIED)
def test_a_slice_of_a_parameter_that_is_copied(use: str) -> None:
    assert not may_stay_in_place(part_of("parameter", IS_COPIED[use]))


@pytest.mark.parametrize("kind", ["input", "computed"])
@pytest.mark.parametrize("use", STAYS)
def test_a_slice_of_what_else_there_is_is_copied(use: str, kind: str) -> None:
    """It would keep the whole of it."""
    assert not may_stay_in_place(part_of(kind, STAYS[use]))
