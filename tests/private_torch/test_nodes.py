"""The private torch APIs in `functional_parallel/_torch/nodes.py` do what the library relies on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from functional_parallel import _torch

aten = torch.ops.aten
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    *[(aten.mul.Tensor, (2, [3, None]), {})] * 3,
    *[(abs, (), {})] * 2,  # a name of Python's
    (operator.getitem, (), {}),
    (aten.slice.Tensor, (), {"start": 1}),
    *[(aten.sum.dim_IntList, (), {})] * 2,
    *[(torch.ops.aten.sqrt.default, (), {})] * 2,
]


def graph_of(add: Callable[..., torch.fx.Node]) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    x = graph.placeholder("mul_tensor_1")
    nodes = [add(graph, op, (x, *args), kwargs) for op, args, kwargs in CALLS]
    with graph.inserting_before(nodes[1]):
        add(graph, torch.neg, (x,), None)
    graph.call_function(aten.mul.Tensor, (x, x))
    add(graph, aten.mul.Tensor, (x, x), {})
    graph.output(tuple(nodes))
    return graph


def test_a_node_is_that_of_call_function() -> None:
    own, torchs = graph_of(_torch.add_call), graph_of(torch.fx.Graph.call_function)
    assert str(own) == str(torchs) and len(own.nodes) == len(torchs.nodes)
    own.lint()
    for op in (aten.mul.Tensor, abs, torch.neg):
        found = [[node.name for node in graph.find_nodes(op="call_function", target=op)] for graph in (own, torchs)]
        assert found[0] == found[1] != []
    x = next(iter(own.nodes))
    assert [user.name for user in x.users] == [user.name for user in next(iter(torchs.nodes)).users]
    assert type(own.find_nodes(op="call_function", target=aten.mul.Tensor)[0].args[2]).__name__ == "immutable_list"


def test_a_named_node_is_that_of_node_copy() -> None:
    def copied(graph: torch.fx.Graph, node: torch.fx.Node, operand: Callable[..., Any]) -> torch.fx.Node:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        return _torch.add_call(graph, node.target, args, kwargs, node.name)

    source = graph_of(torch.fx.Graph.call_function)
    copies = []
    for copy in (copied, torch.fx.Graph.node_copy):
        graph = torch.fx.Graph()
        values = {next(iter(source.nodes)): graph.placeholder("mul_tensor_3")}  # so that a name is taken
        for node in source.find_nodes(op="call_function", target=aten.mul.Tensor):
            values[node] = copy(graph, node, values.__getitem__)
        graph.output(tuple(values.values()))
        graph.lint()
        copies.append(graph)
    assert str(copies[0]) == str(copies[1]) and len(copies[0].nodes) == len(copies[1].nodes)
    assert len(copies[0].find_nodes(op="call_function", target=aten.mul.Tensor)) > 3


def test_an_erased_node_is_forgotten() -> None:
    """torch's record of names keeps it, with all that its meta holds."""
    graph = torch.fx.Graph()
    node = _torch.add_call(graph, torch.neg, (graph.placeholder("x"),))
    graph.erase_node(node)
    assert not any(held is node for held in graph._graph_namespace._obj_to_name)
    assert _torch.add_call(graph, torch.neg, ()).name == "neg_1"
