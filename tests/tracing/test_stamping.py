"""Copies of ops: operands are replaced, and facts about the ops are kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from functional_parallel.ir import Aval, NodeInfo, Source, Template, Traced, has_slices_of, info, set_info, slices_of

aten = torch.ops.aten


def chain() -> tuple[Traced, list[fx.Node]]:
    traced = Traced(fx.Graph())
    x, w = (traced.graph.placeholder(name) for name in "xw")
    traced.inputs = [x, w]
    source = Source("model.py", 3, "layer", "y = f(x)", region="again 1")
    product = traced.call(aten.mm.default, (x, w), NodeInfo(source=source))
    joined = traced.call(aten.cat.default, ([product, x, product], 0), NodeInfo(forward_node=product))
    kwargs = {"dtype": torch.float64}
    total = traced.call(aten.sum.default, (joined,), NodeInfo(source=replace(source, stage=2), forward_node=x), kwargs)
    return traced, [product, joined, total]


def test_operands_are_replaced_where_they_are() -> None:
    """In lists too; what is not replaced is shared."""
    traced, ops = chain()
    x, w = traced.inputs
    copies = Template(ops).stamp(traced, {x: ops[2]})
    product, joined, total = (copies[op] for op in ops)
    assert product.args == (ops[2], w)
    assert list(joined.args[0]) == [product, ops[2], product] and joined.args[1] == 0
    assert total.args == (joined,) and total.kwargs == {"dtype": torch.float64}
    assert list(traced.nodes) == [*ops, product, joined, total]
    assert product in w.users and product in ops[2].users


def test_facts_are_copied_and_renamed() -> None:
    traced, ops = chain()
    x, _ = traced.inputs
    copies = Template(ops).stamp(traced, {x: ops[2]}, lambda source: replace(source, stage=source.stage + 1))
    stages = [source.stage for source in (info(copies[op]).source for op in ops) if source is not None]
    assert stages == [1, 3] and info(copies[ops[1]]).source is None
    assert info(copies[ops[1]]).forward_node is copies[ops[0]]
    assert info(copies[ops[2]]).forward_node is ops[2]
    assert info(ops[0]).source is not info(copies[ops[0]]).source


def test_a_template_outlives_its_graph() -> None:
    """It is copied into another graph as it was when it was made."""
    traced, ops = chain()
    template = Template(ops)
    ops[0].args = (traced.inputs[1], traced.inputs[1])
    other = Traced(fx.Graph())
    a, b = (other.graph.placeholder(name) for name in "ab")
    copies = template.stamp(other, dict(zip(traced.inputs, (a, b), strict=True)))
    assert copies[ops[0]].args == (a, b)
    assert {operand.graph for node in other.nodes for operand in node.all_input_nodes} == {other.graph}


def test_lines_that_the_library_emitted_and_stages_stay_apart() -> None:
    """Equal lines may differ in whether they are implied, and in their stage."""
    traced = Traced(fx.Graph())
    x = traced.graph.placeholder("x")
    lines = [Source("m.py", 3, "f", "x", implied=implied, stage=stage) for implied in (False, True) for stage in (0, 1)]
    ops = [traced.call(aten.sin.default, (x,), NodeInfo(source=line)) for line in lines]
    copies = Template(ops).stamp(traced, {}, lambda source: replace(source, line=source.line + 1 + source.stage))
    found = [info(copies[op]).source for op in ops]
    assert [(each.line, each.implied, each.stage) for each in found if each] == [
        (4, False, 0),
        (5, False, 1),
        (4, True, 0),
        (5, True, 1),
    ]


def test_slices_are_exchanged() -> None:
    """Of the op that takes one, and of the op that adds a gradient to it."""
    traced = Traced(fx.Graph())
    x = traced.graph.placeholder("x")
    set_info(x, NodeInfo(val=Aval((6, 2), torch.float32)))
    layer = traced.call(aten.select.int, (x, 0, 1), NodeInfo())
    part = traced.call(aten.slice.Tensor, (x, 0, 2, 4), NodeInfo())
    of_layer = traced.call(aten.select_backward.default, (layer, [6, 2], 0, 1), NodeInfo(forward_node=layer))
    of_part = traced.call(aten.slice_backward.default, (part, [6, 2], 0, 2, 4, 1), NodeInfo(forward_node=part))
    ops = [layer, part, of_layer, of_part]
    others = [
        traced.call(aten.select.int, (x, 0, 3), NodeInfo()),
        traced.call(aten.slice.Tensor, (x, 0, -2), NodeInfo()),
    ]
    others.append(traced.call(aten.slice.Tensor, (x, 0, -2, 1 << 62), NodeInfo()))
    assert slices_of(others) == [(0, 3), (0, -2), (0, 4, 6)]
    copies = Template(ops).stamp(traced, {}, slices=[(0, 3), (0, 4, 6)])
    assert copies[layer].args == (x, 0, 3) and copies[part].args == (x, 0, 4, 6)
    assert copies[of_layer].args == (copies[layer], [6, 2], 0, 3)
    assert copies[of_part].args == (copies[part], [6, 2], 0, 4, 6, 1)
    assert has_slices_of(ops, {layer, part}) and not has_slices_of(ops, {layer})
    of_part.args = (part, [6, 2], 0, 2, 5, 1)
    assert not has_slices_of(ops, {layer, part})
