"""An op's binding in Python is that op."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

from functional_parallel.runtime.execution.kernels import _BOUND, _METHODS, called_by

aten = torch.ops.aten


def arguments_of(name: str) -> list[tuple[Any, ...]]:
    """Arguments as graphs hold them, by the op's name."""
    x, y, row = torch.arange(1.0, 7.0).view(2, 3), torch.arange(6.0).view(2, 3).square() + 1, torch.arange(1.0, 4.0)
    pair = [(x, y), (x, row), (x, 2.5), (x.bool(), y), (x.long(), x.long()), (x.long(), y)]
    return {
        "add": pair,
        "sub": pair[:3] + pair[4:],
        "mul": pair,
        "div": pair,
        "embedding": [(x, torch.tensor([1, 0, 1])), (x, torch.tensor([[1]]), 0)],
        "full": [([2], 3), ([], 0.5), ([1], True)],
        "cat": [([x, y], 0), ([x, y], -1), ([x, x.long()],)],
        "clone": [(x,), (x.t(),)],
        "mm": [(x, y.t())],
        "native_layer_norm": [(x, [3], row, row, 1e-5), (x, [3], None, None, 1e-5)],
        "neg": [(x,), (x.long(),)],
        "permute": [(x, [1, 0])],
        "reshape": [(x, [3, 2]), (x.t(), [6]), (x, [-1])],
        "scalar_tensor": [(2,), (0.5,)],
        "select": [(x, 0, 1), (x, -1, -1)],
        "stack": [([x, y], 0), ([x, y], -1)],
        "split_with_sizes": [(x, [1, 2], 1), (x, [1, 1])],
        "sum": [(x,), (x.long(),), (x.bool(),)],
        "sum.dim": [(x, [0]), (x, [0, 1], True), (x, [-1], False)],
        "t": [(x,), (row,)],
        "transpose": [(x, 0, -1)],
        "unsqueeze": [(x, -1)],
        "where": [(x > 2, x, y), (x > 2, row, y)],
        "zeros": [([2, 3],), ([],)],
        "add_": [(x, y), (x, row), (x.t(), y.t()), (x, 2.5)],
        "addmm_": [(x[:, :2], x, y.t()), (x.t()[:2], x, y.t())],
    }[name]


@pytest.mark.parametrize("op", [*_BOUND, *_METHODS], ids=str)
def test_torchs_binding_of_an_op_is_that_op(op: Any) -> None:
    name = op._schema.name.removeprefix("aten::")
    call = called_by(op)
    assert not isinstance(call, torch._ops.OpOverload)
    for args in arguments_of("sum.dim" if op is aten.sum.dim_IntList else name):
        keywords: list[dict[str, Any]] = [{}]
        if name in ("add", "sub", "add_") and args[0].dtype != torch.bool:
            keywords.append({"alpha": 3})
        if name == "clone":
            keywords.append({"memory_format": torch.contiguous_format})
        if name == "sum":
            keywords.append({"dtype": torch.float64})
        if name in ("full", "scalar_tensor", "zeros"):
            keywords.append({"dtype": torch.float64, "device": torch.device("cpu"), "pin_memory": False})
        for options in keywords:
            made = (leaves(function(*copies(args), **options)) for function in (call, op))
            for got, want in zip(*made, strict=True):
                assert got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def copies(args: tuple[Any, ...]) -> list[Any]:
    """Tensors that lie as the given ones do, since some ops write into theirs."""
    return optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, list(args))
