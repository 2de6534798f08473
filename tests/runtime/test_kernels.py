"""Faster kernels compute the same, and are taken where they fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.runtime import kernels
from functional_parallel.runtime.codegen import Writer
from functional_parallel.runtime.kernels import _BOUND, by_transposes, called_by, faster_kernel
from sharding_specs import Mesh

aten = torch.ops.aten
ONEDNN = pytest.mark.skipif(not _torch.has_onednn_linear(), reason="this torch has no oneDNN, or no MKL beside it")
LAYOUTS = ["contiguous", "turned", "slice of columns", "slice of rows", "expanded", "offset"]


@pytest.fixture(autouse=True, scope="module")
def onednn_wherever_it_is() -> Iterator[None]:
    """Not only where it is the faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "prefers_onednn", _torch.has_onednn_linear)
        yield


def integers(rows: int, columns: int, layout: str, seed: int) -> torch.Tensor:
    """Small integers in float32, so that sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    return {
        "contiguous": lambda: draw(rows, columns),
        "turned": lambda: draw(columns, rows).t(),
        "slice of columns": lambda: draw(rows, columns + 3)[:, 2:-1],
        "slice of rows": lambda: draw(rows * 2, columns)[::2],
        "expanded": lambda: draw(1, columns).expand(rows, columns),
        "offset": lambda: draw(rows * columns + 1)[1:].view(rows, columns),
    }[layout]()


@ONEDNN
@settings(max_examples=100)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    seed=st.integers(0, 100),
)
@example(m=300, k=257, n=129, layouts=("turned", "slice of rows"), seed=0)
def test_the_product_is_exact_on_integers(m: int, k: int, n: int, layouts: tuple[str, str], seed: int) -> None:
    a, b = integers(m, k, layouts[0], seed), integers(k, n, layouts[1], seed + 1)
    product = _torch.onednn_mm(a, b)
    assert torch.equal(product, torch.mm(a, b)) and product.is_contiguous()


def kernels_of(size: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    compiled, params = step_of(size, dtype)
    nodes = compiled.lower(params, torch.ones(size, size, dtype=dtype)).traced.nodes
    return [faster_kernel(node) for node in nodes if node.target is aten.mm.default]


def step_of(size: int, dtype: torch.dtype) -> Any:
    params = {"w": torch.ones(size, size, dtype=dtype), "b": torch.ones(size, dtype=dtype)}
    return fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=1)), params


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"]).relu() @ params["w"] + params["b"]).sum()


@ONEDNN
def test_it_is_taken_for_large_products_of_float32() -> None:
    assert set(kernels_of(128)) == {_torch.onednn_mm}
    assert set(kernels_of(16)) == {None}, "too small to be worth it"
    assert set(kernels_of(128, torch.float64)) == {None}, "oneDNN has no float64"


@pytest.fixture
def without_onednn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    yield
    torch.backends.mkldnn.enabled = True


@pytest.mark.usefixtures("without_onednn")
def test_it_can_be_switched_off() -> None:
    assert set(kernels_of(128)) == {None}


@ONEDNN
def test_programs_run_on_it_and_derivatives_of_them_do_not() -> None:
    compiled, params = step_of(128, torch.float32)
    x = integers(128, 128, "contiguous", 0)
    grads, value = compiled(params, x)
    want, want_value = torch.func.grad_and_value(loss)(params, x)
    assert torch.equal(value, want_value)
    assert all(torch.equal(grads[name], want[name]) for name in want)
    forward = fp.compile(fp.data_parallel("data")(loss), Mesh(data=1))
    again = torch.func.grad(lambda p: forward(p, x))(params)
    assert all(torch.equal(again[name], want[name]) for name in want)


@ONEDNN
def test_a_transpose_before_a_product_is_not_run() -> None:
    compiled, params = step_of(128, torch.float32)
    traced = compiled.lower(params, torch.ones(128, 128)).traced
    found = by_transposes(traced)
    products = [node for node in traced.nodes if node.target is aten.mm.default]
    assert found == {node: node.args[1].args[0] for node in products if node.args[1].target is aten.t.default}
    assert found, "the gradient of x @ w by x is a product with w's transpose"
    writer = Writer(traced, lambda node, writer: writer.call(node, writer.names.__getitem__))
    writer.function()
    unread = {product.args[1] for product in found if len(product.args[1].users) == 1}
    assert unread and not unread & writer.names.keys()


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
    }[name]


@pytest.mark.parametrize("op", _BOUND, ids=str)
def test_torchs_binding_of_an_op_is_that_op(op: Any) -> None:
    name = op._schema.name.removeprefix("aten::")
    call = called_by(op)
    assert not isinstance(call, torch._ops.OpOverload)
    for args in arguments_of("sum.dim" if op is aten.sum.dim_IntList else name):
        keywords: list[dict[str, Any]] = [{}]
        if name in ("add", "sub") and args[0].dtype != torch.bool:
            keywords.append({"alpha": 3})
        if name == "clone":
            keywords.append({"memory_format": torch.contiguous_format})
        if name == "sum":
            keywords.append({"dtype": torch.float64})
        if name in ("full", "scalar_tensor", "zeros"):
            keywords.append({"dtype": torch.float64, "device": torch.device("cpu"), "pin_memory": False})
        for options in keywords:
            for got, want in zip(leaves(call(*args, **options)), leaves(op(*args, **options)), strict=True):
                assert got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
