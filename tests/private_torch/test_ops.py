"""Each private torch API in `functional_parallel/_torch/ops.py` does what the library relies on."""

from __future__ import annotations

from typing import get_origin

import pytest
import torch

from functional_parallel import _torch

from .count import Count

aten = torch.ops.aten


def test_ops_have_types() -> None:
    assert isinstance(aten.add.Tensor, get_origin(_torch.Op)) and isinstance(aten.add, get_origin(_torch.OpPacket))
    assert isinstance(torch.ops.higher_order.cond, _torch.HigherOrderOp)


def test_an_op_may_be_made_of_others() -> None:
    composite = [aten.matmul.default, aten.linear.default, aten.broadcast_tensors.default]
    assert all(map(_torch.is_composite, composite))
    assert not any(map(_torch.is_composite, [aten.mm.default, aten.add.Tensor, aten.view.default]))
    with Count() as mode:
        _torch.as_composed(aten.matmul.default, torch.ones(2, 3), torch.ones(3, 2))
        _torch.as_composed(aten.upsample_bilinear2d.vec, torch.ones(1, 1, 2, 2), [4, 4], False, None)
    assert [op for op in mode.seen if op is not aten.ones.default] == [
        aten.mm.default,
        aten.upsample_bilinear2d.default,
    ]


def test_an_op_of_lists_is_made_of_one_per_tensor() -> None:
    x, y = torch.ones(2), torch.ones(3)
    with Count() as mode:
        found = _torch.one_by_one(aten._foreach_mul.Scalar, [x, y], 2.0)
        _torch.one_by_one(aten._foreach_add_.List, [x, y], found, alpha=2)
    assert mode.seen.count(aten.mul.Scalar) == mode.seen.count(aten.add_.Tensor) == 2
    assert torch.equal(found[1], torch.full((3,), 2.0)) and torch.equal(y, torch.full((3,), 5.0))
    packets = (getattr(aten, name) for name in dir(aten) if name.startswith("_foreach_"))
    ops = [getattr(each, name) for each in packets for name in each.overloads() if "out" not in name]
    assert all(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeExplicitAutograd) for op in ops)


def test_in_place_ops_have_functional_twins() -> None:
    assert _torch.functional_variant(aten.add_.Tensor) is aten.add.Tensor
    assert _torch.functional_variant(aten.copy_.default) is aten.copy.default
    assert _torch.functional_variant(aten.pow_.Scalar) is aten.pow.Tensor_Scalar  # its `Scalar` is a number's power
    assert _torch.functional_variant(aten.transpose_.default) is aten.transpose.int
    assert _torch.functional_variant(aten.add.Tensor) is None
    assert _torch.functional_variant(aten.fill_.Scalar) is aten.fill.Scalar
    assert _torch.functional_variant(aten.index_put_.default) is aten.index_put.default
    assert _torch.functional_variant(aten.div.out) is aten.div.Tensor
    assert _torch.functional_variant(aten.sum.IntList_out) is aten.sum.dim_IntList
    assert _torch.functional_variant(aten.add.Tensor) is None


def test_an_op_is_called_without_its_python_frame() -> None:
    direct = _torch.direct_call(aten.mm.default)
    assert direct is not aten.mm.default
    assert torch.equal(direct(torch.eye(2), torch.eye(2)), torch.eye(2))
    assert _torch.direct_call(len) is len


def test_stride_free_ops_take_any_layout() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(_torch.stride_free(aten.view.default)(transposed, [6]), transposed.reshape(6))
    assert _torch.stride_free(aten.mm.default) is aten.mm.default


def test_a_library_op_may_have_no_derivative() -> None:
    library = torch.library.Library("private_torch_tests", "DEF")
    kinds = ("CompositeExplicitAutograd", "CPU", "Autograd", "CompositeImplicitAutograd")
    for number, kind in enumerate(kinds):
        library.define(f"op{number}(Tensor x) -> Tensor")
        library.impl(f"op{number}", lambda x: x * x, kind)
    found = [getattr(torch.ops.private_torch_tests, f"op{number}").default for number in range(len(kinds))]
    assert [_torch.has_derivative(op) for op in found] == [False, False, True, True]
    assert _torch.has_derivative(aten.mm.default)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        assert torch.equal(torch.func.grad(lambda x: found[0](x).sum())(torch.ones(2)), torch.zeros(2))  # it is 2


def test_what_runs_under_transforms_can_be_mapped() -> None:
    total, a, b = torch.arange(27.0).view(3, 3, 3)
    op = _torch.under_transforms(aten.addmm_.default)
    mapped = torch.func.vmap(op, in_dims=(None, 0, None))(total, torch.stack([a, b]), b)  # not possible in place
    assert torch.equal(mapped, torch.stack([total + a @ b, total + b @ b]))
    assert _torch.under_transforms(aten.view.default) is _torch.stride_free(aten.view.default)


def test_torch_writes_an_op_in_simpler_ones() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    softmax = x.softmax(-1)
    formula = _torch.decomposition_of(aten._softmax_backward_data.default)
    assert formula is not None and _torch.decomposition_of(aten.mm.default) is None
    torch.testing.assert_close(
        formula(y, softmax, 1, x.dtype), aten._softmax_backward_data.default(y, softmax, 1, x.dtype)
    )


def test_attention_runs_on_rows_in_pieces() -> None:
    """torch's own kernel for the CPU does not look how its operands lie."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(2, 2, 4, 6).mT
    whole, _ = op(*[q.contiguous()] * 3)
    found, _ = _torch.stride_free(op)(q, q, q)
    assert torch.equal(found, whole)


def test_grouped_products_are_reached_by_the_name_that_a_trace_intercepts() -> None:
    a, b, ends = torch.randn(4, 8), torch.randn(2, 8, 4), torch.tensor([1, 4], dtype=torch.int32)
    found = _torch.grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(found, torch.cat([a[:1] @ b[0], a[1:] @ b[1]]))
    assert torch.equal(torch.nn.functional.grouped_mm(a, b, offs=ends), found)


def test_norms_are_at_least_float32() -> None:
    """torch's multi-tensor kernel, which takes the dtype of the result."""
    with Count() as mode:
        narrow = _torch.norms([torch.full((4,), 6e4, dtype=torch.float16), torch.zeros(0, dtype=torch.float16)])
    assert mode.seen.count(aten._foreach_norm.Scalar) == 1
    assert [x.dtype for x in narrow] == [torch.float32] * 2 and [x.item() for x in narrow] == [120000.0, 0.0]
    assert _torch.norms([torch.tensor([3.0, 4.0], dtype=torch.float64)])[0].item() == 5.0


def test_backwards_without_a_derivative_have_formulas() -> None:
    """torch's decompositions of them, which may be differentiated; the ops themselves may not."""
    x, gradient = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    weight = torch.randn(4, dtype=torch.float64)
    _, mean, rstd = aten.native_group_norm(x, weight, None, 2, 4, 3, 2, 1e-5)
    cases = {
        aten.silu_backward.default: (gradient, x),
        aten.mish_backward.default: (gradient, x),
        aten.logit_backward.default: (gradient, x.sigmoid(), None),
        aten.native_group_norm_backward.default: (gradient, x, mean, rstd, weight, 2, 4, 3, 2, [True, True, True]),
    }
    for op, args in cases.items():
        assert not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutogradCPU)
        formula = _torch.under_transforms(op)
        torch.testing.assert_close(formula(*args), op(*args))  # type: ignore[operator]
