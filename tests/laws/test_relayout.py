"""A relayout gives each rank its shard of the same tensor, for all pairs of layouts, and derivatives pass through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.lowering import lower
from functional_parallel.runtime import SimulatedRuntime
from functional_parallel.testing import strategies
from sharding_specs import Mesh, P, SpecError, padded_shape, shard_leaf
from sharding_specs.blocks import units

from ..storages import STORAGES


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Mesh, P, P, tuple[int, ...]]:
    mesh, ndim = draw(strategies.meshes(most_ranks=6)), draw(st.integers(1, 3))
    held, wanted = (draw(strategies.specs(mesh, ndim, partial=number == 0)) for number in range(2))
    free = sorted(set(mesh.axes) - wanted.axes - held.axes)
    wanted = wanted.replace(reduced=draw(st.sets(st.sampled_from(free))) if free else ())
    sizes = [1] * ndim
    for spec in (held, wanted):
        for dim, factors in enumerate(spec.dims):
            if not all(isinstance(factor, str) for factor in factors) or not draw(st.booleans()):
                for factor in factors:  # even, also where the other layout has numbers
                    sizes[dim] *= mesh.axis_size(factor) if isinstance(factor, str) else units(factor)
    shape = tuple(size * draw(st.integers(1, 3)) for size in sizes)
    held, wanted = (spec.fitted(shape, mesh).replace(storage=draw(STORAGES)) for spec in (held, wanted))
    return mesh, held, wanted, shape


def fits(spec: P, shape: tuple[int, ...], mesh: Mesh) -> bool:
    try:
        padded = padded_shape(shape, spec, mesh)
    except SpecError:
        return False
    return all(dim in spec.padded or size == full for dim, (size, full) in enumerate(zip(shape, padded, strict=True)))


def lowered(mesh: Mesh, held: P, wanted: P, x: torch.Tensor) -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        return fp.relayout(x, held, wanted)

    return lower(f, mesh, (x,), ((held.in_compute(),), wanted.in_compute()), name="relayout").program


@settings(max_examples=80, deadline=None)
@given(pairs())
def test_each_rank_gets_its_shard(case: tuple[Mesh, P, P, tuple[int, ...]]) -> None:
    mesh, held, wanted, shape = case
    assume(fits(held, shape, mesh) and fits(wanted, shape, mesh))
    x, runtime = strategies.numbered(shape), SimulatedRuntime(mesh, deduplicate=False)
    program = lowered(mesh, held, wanted, x)
    (found,) = runtime.run(program, [[shard_leaf(x, held, mesh, rank, pad=True) for rank in mesh.ranks]])
    for rank in mesh.ranks:
        right = shard_leaf(x, wanted, mesh, rank, pad=True)
        assert found[rank].shape == right.shape
        assert torch.equal(found[rank], right)
        assert torch.equal(wanted.fetch(right), shard_leaf(x, wanted.in_compute(), mesh, rank, pad=True))


@settings(max_examples=20, deadline=None)
@given(pairs())
def test_the_way_back_is_the_inverse_and_derivatives_pass(case: tuple[Mesh, P, P, tuple[int, ...]]) -> None:
    mesh, held, wanted, shape = case
    held, wanted = held.replace(unreduced=()).in_compute(), wanted.replace(reduced=())
    assume(fits(held, shape, mesh) and fits(wanted, shape, mesh) and not held.padded and not wanted.padded)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return fp.relayout(fp.relayout(x, held, wanted), wanted, held)

    fp.testing.assert_same(there_and_back, lambda x: x, mesh, (held,), (strategies.numbered(shape),))


@pytest.mark.parametrize(("held", "wanted", "counts"), [
    (P(), P("a"), {}),
    (P("a"), P(None, "a"), {("all_to_all", ("a",)): 1}),
    (P("a"), P("b"), {("all_gather", ("a",)): 1}),
    (P("a"), P(("a", "b")), {}),
    (P(("a", "b")), P("a"), {("all_gather", ("b",)): 1}),
    (P(unreduced={"a", "b"}), P("a"), {("psum_scatter", ("a",)): 1, ("psum", ("b",)): 1}),
    (P(unreduced={"a"}), P(), {("psum", ("a",)): 1}),
    (P(None, "a", "b"), P(("a", "b")), {("all_to_all", ("a",)): 1, ("all_to_all", ("b",)): 1}),
    (P("a", padded={0: 7}), P(None, "a", padded={1: 3}), {("all_to_all", ("a",)): 1}),
])  # fmt: skip
def test_collectives(held: P, wanted: P, counts: Any) -> None:
    shape = tuple({**dict(enumerate((8, 4, 4))), **held.padded, **wanted.padded}.values())
    found = lowered(Mesh(a=2, b=2), held, wanted, torch.zeros(shape)).counts()
    assert {key: count for key, count in found.items() if key[0] != "pscatter"} == counts


@pytest.mark.parametrize("wanted", [P("a"), P(None, "a", padded={1: 2}), P()])
def test_owners(wanted: P) -> None:
    mesh, x, owned = Mesh(a=3), strategies.numbered((3, 2)), P(owner={"a": 1})
    runtime = SimulatedRuntime(mesh, deduplicate=False)
    (found,) = runtime.run(lowered(mesh, owned, wanted, x), [[x] * 3])
    assert all(torch.equal(found[rank], shard_leaf(x, wanted, mesh, rank, pad=True)) for rank in mesh.ranks)
    if wanted.axes:
        (back,) = runtime.run(lowered(mesh, wanted, owned, x), [found])
        assert torch.equal(back[1], x)


@pytest.mark.parametrize(("held", "wanted", "message"), [
    (P(reduced={"a"}), P(), "no conversion to"),
    (P(), P(unreduced={"a"}), "no conversion to"),
    (P(), P(owner={"a": 0}), "an owner gets shards"),
    (P(None, None, "a"), P(), "more dims than a tensor of shape"),
])  # fmt: skip
def test_refusals(held: P, wanted: P, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fp.relayout(torch.zeros(2, 2), held, wanted)
