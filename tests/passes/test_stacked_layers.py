"""Layers of a stack are replaced by what was stacked, where the ops between treat each layer alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from functional_parallel.ir import Aval
from functional_parallel.passes.stacked_layers import fold_layers
from functional_parallel.tracing import trace

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("between", "is_folded"),
    [
        (lambda stack: -stack, True),
        (lambda stack: F.pad(stack, (1, 2)), True),
        (lambda stack: F.pad(stack, (0, 0, 1, 0)), True),
        (lambda stack: F.pad(stack, (0, 0, 0, 0, 1, 0)), False),  # layer 1 is now layer 2
        (lambda stack: stack[:, :, 1:], True),
        (lambda stack: stack[1:], False),
        (lambda stack: stack.flip(0), False),
    ],
)
def test_a_layer_is_what_was_stacked(between: Callable[[Tensor], Tensor], is_folded: bool) -> None:
    def f(*layers: Tensor) -> list[Tensor]:
        found = between(torch.stack(layers))
        return [found[1] * 2, found[0] + 1]

    traced = fold_layers(trace(f, [Aval((2, 3), torch.float32)] * 3))
    layers = [torch.arange(6.0).view(2, 3) + 10 * number for number in range(3)]
    values = dict(zip(traced.inputs, layers, strict=True))
    for node in traced.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    for output, expected in zip(traced.outputs, f(*layers), strict=True):
        assert torch.equal(values[output], expected)
    assert is_folded == all(node.target is not aten.stack.default for node in traced.nodes)
