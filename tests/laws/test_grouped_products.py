"""Grouped matrix products: values, derivatives, and every dim that can be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

MESH = Mesh(axis=2)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def dense(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Every product for every row, of which a mask keeps those of the row's group."""
    rows = a.shape[0] if b.ndim == 3 else a.shape[1]
    place = torch.arange(rows)
    ends = torch.cat([torch.zeros(1, dtype=offs.dtype), offs])
    member = ((place >= ends[:-1, None]) & (place < ends[1:, None])).to(a.dtype)
    if b.ndim == 3:
        return torch.einsum("gs,sk,gkn->sn", member, a, b)
    return torch.einsum("gs,ms,sn->gmn", member, a, b)


@given(
    outer=st.booleans(),
    ends=st.lists(st.integers(0, 6), min_size=2, max_size=2).map(sorted),
    dims=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 6])),
    split=st.sampled_from([(P("axis"), P()), (P(None, "axis"), P()), (P(), P("axis")), (P(), P(None, "axis"))]),
    last=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=15, deadline=None)
def test_value_and_derivatives(
    outer: bool, ends: list[int], dims: tuple[int, int], split: tuple[P, P], last: bool, seed: int
) -> None:
    offs = torch.tensor([*ends, 6], dtype=torch.int32)
    a = integers(dims[0], 6, seed=seed) if outer else integers(6, dims[0], seed=seed)
    b = integers(6, dims[1], seed=seed + 1) if outer else integers(4, dims[0], dims[1], seed=seed + 1)
    offs = offs if outer else torch.cat([offs, offs[-1:]])
    specs = (split[0], P(None, None, "axis") if last and not outer else split[1], P())

    def product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b, offs=offs)

    local = fp.partition(product, "axis", specs, parameters=None)
    assert torch.equal(fp.compile(local, MESH)(a, b, offs), dense(a, b, offs))

    def cubed(f: Any) -> Any:
        return lambda a, b, offs: (f(a, b, offs) * (1 + f(a, b, offs))).sum()

    gradient = fp.grad(fp.partition(cubed(product), "axis", specs, parameters=None), (0, 1))
    for found, want in zip(
        fp.compile(gradient, MESH)(a, b, offs), fp.grad(cubed(dense), (0, 1))(a, b, offs), strict=True
    ):
        assert torch.equal(found, want)


def test_forward_and_second_derivatives_and_vmap() -> None:
    a, b, offs = integers(6, 2), integers(3, 2, 4, seed=1), torch.tensor([2, 2, 6], dtype=torch.int32)

    def check(derivative: Any) -> None:
        f = derivative(lambda a, b: F.grouped_mm(a, b, offs=offs))
        found = fp.compile(f, MESH, in_specs=(P(), P()), out_specs=P())(a, b)
        torch.testing.assert_close(found, derivative(lambda a, b: dense(a, b, offs))(a, b), rtol=0, atol=0)

    check(lambda f: lambda a, b: fp.jvp(f, (a, b), (a + 1, b - 1)))
    check(lambda f: lambda a, b: fp.jvp(fp.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1)), (a, b), (a + 1, b - 1)))
    check(
        lambda f: (
            lambda a, b: fp.grad(lambda a, b: (fp.grad(lambda b: (f(a, b) ** 2).sum())(b) ** 2).sum(), (0, 1))(a, b)
        )
    )
    check(
        lambda f: (
            lambda a, b: fp.vmap(fp.grad(lambda a, b: (f(a, b) ** 2).sum()), in_dims=(0, None))(
                torch.stack([a, a + 1]), b
            )
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_computes_what_torch_computes(dtype: torch.dtype) -> None:
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    forms = {
        "rows": (integers(8, 16), integers(3, 16, 24)),
        "columns": (integers(3, 24, 16), integers(16, 8)),
        "both": (integers(16, 8), integers(8, 24)),
        "stacks": (integers(3, 8, 16), integers(3, 16, 24)),
    }
    for name, (a, b) in forms.items():
        a, b, given = a.to(dtype), b.to(dtype), None if name == "stacks" else offs
        f = fp.compile(lambda a, b: F.grouped_mm(a, b, offs=given), MESH, in_specs=(P(), P()), out_specs=P())  # noqa: B023
        assert torch.equal(f(a, b), F.grouped_mm(a, b, offs=given)), name


def test_a_product_without_offsets_is_refused() -> None:
    f = fp.compile(lambda a, b: F.grouped_mm(a, b), MESH, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(TracingError, match=r"test_grouped.*have 2 and 3, and offs is missing"):
        f(integers(4, 2), integers(2, 2, 2))


# -----------------------------------------------------------------------------
# Histograms, which count the rows of the groups
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("axis"), P(None, "axis")], ids=str)
def test_counts_of_a_histogram_add_up(spec: P) -> None:
    x = integers(4, 6)
    for f, gathers in ((lambda x: torch.histc(x, 5, -4, 4), 0), (lambda x: torch.histc(x, 5), 1)):
        step = fp.compile(fp.partition(f, "axis", (spec,), parameters=None, strict=True), MESH)
        assert torch.equal(step(x), f(x))
        assert step.program.counts() == {("all_gather" if gathers else "psum", ("axis",)): 1}
