"""Copies of a body are found by their ops, wherever their operands come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_parallel.ir import Aval, Copy, Traced, copies_of, info, without_repeats
from functional_parallel.partitioner.preparation import prepare
from functional_parallel.tracing import trace

SQUARE = Aval((4, 4), torch.float32)


def traced(fn: Callable[..., Any], inputs: int) -> Traced:
    return prepare(trace(lambda *tensors: [fn(*tensors)], [SQUARE] * inputs, forward_only=True))


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(torch.sin(x) @ w).exp()


def forms(copies: list[Copy]) -> list[int]:
    return [copy.form for copy in copies]


def test_layers_of_a_loop() -> None:
    def loop(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = layer(x, w)
        return x.sum()

    graph = traced(loop, 5)
    copies = copies_of(graph)
    assert forms(copies) == [0] * 4
    ops = [node.target.__name__ for node in copies[0].nodes]
    assert ops == ["sin.default", "mm.default", "tanh.default", "exp.default", "add.Tensor"]
    assert [node for copy in copies for node in copy.nodes] == list(graph.nodes)[:-1]
    assert all(copy.escapes == (4,) for copy in copies)  # only the stream is read outside
    stream = [graph.inputs[0], *(copy.nodes[4] for copy in copies)]
    assert [copy.externals for copy in copies] == list(zip(stream, graph.inputs[1:], strict=False))
    with without_repeats():
        assert copies_of(graph) == []


def test_a_value_that_others_read_too_makes_another_form() -> None:
    def loop(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, w in enumerate(weights):
            h = torch.tanh(torch.sin(x) @ w)
            x = x + h.exp()
            kept += [h] if index >= 2 else []
        return x.sum() + kept[0].sum() + kept[1].sum()

    copies = copies_of(traced(loop, 5))
    assert forms(copies) == [0, 0, 1, 1]
    assert copies[0].escapes == (4,) and copies[2].escapes == (2, 4)


def test_which_values_are_read_later() -> None:
    def loop(x: torch.Tensor, shared: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = layer(x, w) * shared
        return x.sum()

    copies = copies_of(traced(loop, 5))
    read = [dict(zip(copy.externals, copy.later, strict=True)) for copy in copies]
    shared = [[later for node, later in each.items() if node.target == "x1"] for each in read]
    assert shared == [[True], [True], [False]] and forms(copies) == [0] * 3


def test_layers_that_differ_in_a_number_or_in_what_they_compute_with() -> None:
    def loop(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for index, w in enumerate(weights):
            x = layer(x, w) * (index + 0.5)
        return x.sum()

    def swapped(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for index, w in enumerate(weights):
            h = torch.tanh(x @ w)
            x = torch.sin(h) - (torch.cos(h) if index % 2 else x).exp() if index < 3 else torch.sin(h) - x.exp()
        return x.sum()

    assert copies_of(traced(loop, 4)) == []
    assert len(set(forms(copies_of(traced(swapped, 5))))) <= 1


def test_two_kinds_of_layers_in_turn() -> None:
    def loop(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for index, w in enumerate(weights):
            x = layer(x, w) if index % 2 else x - torch.relu(x.cos() @ w)
        return x.sum()

    copies = copies_of(traced(loop, 9))
    assert forms(copies) == [0] * 4 and len(copies[0].nodes) == 9


def test_what_is_detached_makes_another_form() -> None:
    """A rule may read whether a value depends on an input that is differentiated."""

    def loop(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights[:2]:
            x = layer(x, w)
        x = x.detach()
        for w in weights[2:]:
            x = layer(x, w)
        return x.sum()

    graph = traced(loop, 5)
    copies = copies_of(graph)
    assert all(info(copy.nodes[0]).val == info(copies[0].nodes[0]).val for copy in copies)
    starts = [copy.externals[0] for copy in copies if copy.externals[0].target == torch.ops.aten.detach.default]
    assert not starts or copies[-2].form != copies[0].form
