"""oneDNN's products are the same, and are taken where they are the faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel import _torch, products
from functional_parallel.products import by_transposes, faster_kernel, is_wide
from functional_parallel.runtime.codegen import Writer
from sharding_specs import Mesh

aten = torch.ops.aten
ONEDNN = pytest.mark.skipif(not _torch.has_onednn_linear(), reason="this torch has no oneDNN, or no MKL beside it")
LAYOUTS = ["contiguous", "turned", "slice of columns", "slice of rows", "expanded", "offset"]


@pytest.fixture(autouse=True, scope="module")
def onednn_wherever_it_is() -> Iterator[None]:
    """Not only where it is the faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "prefers_onednn", _torch.has_onednn_linear)
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


@pytest.mark.parametrize(
    ("processor", "wide"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", False),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n", False),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", True),
        ("Intel64 Family 6 Model 158 Stepping 10, GenuineIntel", False),
        ("arm", False),
        ("", False),
    ],
)
def test_processors_that_multiply_512_bits_at_once(processor: str, wide: bool) -> None:
    assert is_wide(processor) == wide


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
