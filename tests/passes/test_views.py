"""Chains of views become one view or none, and mean the same."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.ir import REARRANGEMENTS, RESHAPES, UNIT_DIMS, VIEWS, Aval
from functional_parallel.passes.fused_views import fuse_views
from functional_parallel.tracing import trace

aten = torch.ops.aten


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, tuple[Any, ...]]]]:
    """A shape, with ones among its sizes, and ops that turn, insert and remove dims one after the other."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=4)))
    x, ops = torch.empty(shape), []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["permute", "unsqueeze", "squeeze", "transpose", "t", "view", "flatten"]))
        if kind == "permute":
            op = (aten.permute.default, (draw(st.permutations(range(x.ndim))),))
        elif kind == "transpose" and x.ndim:
            op = (aten.transpose.int, tuple(draw(st.integers(-x.ndim, x.ndim - 1)) for _ in range(2)))
        elif kind == "t" and x.ndim <= 2:
            op = (aten.t.default, ())
        elif kind == "squeeze" and x.ndim:
            op = (aten.squeeze.dim, (draw(st.integers(-x.ndim, x.ndim - 1)),))
        elif kind == "view" and 1 in x.shape:
            op = (aten.view.default, ([size for size in x.shape if size != 1],))
        elif kind == "flatten" and x.is_contiguous():
            op = (aten.view.default, ([-1],))  # no arrangement: what follows starts anew
        else:
            op = (aten.unsqueeze.default, (draw(st.integers(-x.ndim - 1, x.ndim)),))
        x = op[0](x, *op[1])
        ops.append(op)
    return shape, ops


@settings(max_examples=300)
@given(chains())
def test_a_chain_keeps_its_meaning(chain: tuple[tuple[int, ...], list[Any]]) -> None:
    shape, ops = chain

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        for op, args in ops:
            y = op(y, *args)
        return [y, y + 1]

    traced = trace(f, [Aval(shape, torch.float32)])
    before = run(traced, shape)
    length = sum(1 for _ in traced.nodes)
    after = run(fuse_views(traced), shape)
    assert sum(1 for _ in traced.nodes) <= length
    for a, b in zip(before, after, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def test_einsum_operands_are_turned_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [torch.einsum("bte,ef->btf", x, w)]

    traced = fuse_views(trace(f, [Aval((2, 3, 4), torch.float32), Aval((4, 5), torch.float32)]))
    names = [node.target.name() for node in traced.nodes]
    assert names == ["aten::view", "aten::view", "aten::bmm", "aten::view"]


def test_a_matrix_turned_twice_is_itself() -> None:
    traced = fuse_views(trace(lambda x: [x.t().t() + 1, x.t().t()], [Aval((2, 3), torch.float32)]))
    assert [node.target for node in traced.nodes] == [aten.add.Tensor]
    assert traced.outputs[1] is traced.inputs[0]


def run(traced: Any, shape: tuple[int, ...]) -> list[torch.Tensor]:
    values = {traced.inputs[0]: torch.arange(float(torch.Size(shape).numel())).reshape(shape)}
    for node in traced.nodes:
        args = [values[arg] if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
        target = aten.reshape.default if node.target is aten.view.default else node.target
        values[node] = target(*args)
    return [values[out] for out in traced.outputs]


def test_listed_views_are_views_by_their_schema() -> None:
    """All but one, which torch declares as a copy so that autograd takes it for one."""
    aliasing = {op for op in VIEWS if op._schema.arguments[0].alias_info is not None}
    assert VIEWS - aliasing == {aten._unsafe_view.default}
    assert not any(op._schema.is_mutable for op in VIEWS)
    assert RESHAPES | UNIT_DIMS < REARRANGEMENTS < VIEWS and not RESHAPES & UNIT_DIMS
