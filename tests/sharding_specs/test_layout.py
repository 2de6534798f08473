"""Laws of layouts: shards and whole tensors hold the same numbers, on any mesh, under any spec."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel.testing.strategies import cases, fitting_shapes, meshes, numbered, specs
from sharding_specs import (
    Box,
    Mesh,
    P,
    SpecError,
    holders,
    local_shape,
    padded_shape,
    rank_boxes,
    reshard,
    shard,
    shard_leaf,
    unshard,
    unshard_leaf,
    validate,
)
from sharding_specs.blocks import units

GRID = Mesh(data=2, tensor=2)


@given(cases(partial=True))
def test_unshard_undoes_shard(case: tuple[Mesh, P, torch.Tensor]) -> None:
    mesh, spec, whole = case
    parts = [shard(whole, spec, mesh, rank) for rank in mesh.ranks]
    assert {tuple(part.shape) for part in parts} == {local_shape(whole.shape, spec, mesh)}
    assert torch.equal(unshard(parts, spec, mesh, check=True), whole)


@given(cases())
def test_a_shard_holds_the_blocks_of_its_rank(case: tuple[Mesh, P, torch.Tensor]) -> None:
    """Against another definition: an element's index along a dim, written in the mixed radix of the dim's factors."""
    mesh, spec, whole = case
    wanted: dict[int, list[float]] = {rank: [] for rank in mesh.ranks}
    for index in itertools.product(*map(range, whole.shape)):
        digits = _digits(index, whole.shape, spec, mesh)
        for rank in mesh.ranks:
            at = mesh.coordinates(rank)
            if all(at[axis] == digit for axis, digit in digits.items()):
                wanted[rank].append(whole[index].item())
    for rank in mesh.ranks:
        assert shard(whole, spec, mesh, rank).flatten().tolist() == wanted[rank]


def _digits(index: tuple[int, ...], shape: torch.Size, spec: P, mesh: Mesh) -> dict[str, int]:
    found = {}
    for place, size, factors in zip(index, shape, spec.dims, strict=False):
        for factor in factors:
            if isinstance(factor, tuple):
                owners = [block for block, count in enumerate(factor) for _ in range(count)]  # of each unit
                unit = size // len(owners)
                block = owners[place // unit]
                place, size = place - owners.index(block) * unit, factor[block] * unit
                continue
            size //= mesh.axis_size(factor) if isinstance(factor, str) else factor
            digit, place = divmod(place, size)
            if isinstance(factor, str):
                found[factor] = digit
    return found


@given(st.data())
def test_reshard_equals_unshard_then_shard(data: st.DataObject) -> None:
    first, second, ndim = data.draw(meshes()), data.draw(meshes()), data.draw(st.integers(1, 2))
    before, after = data.draw(specs(first, ndim, partial=True)), data.draw(specs(second, ndim))
    shape = tuple(map(math.lcm, _units(before, first, ndim), _units(after, second, ndim)))
    whole = {"w": numbered(shape)}
    parts = [shard(whole, before, first, rank) for rank in first.ranks]
    moved = reshard(parts, before, first, after, second)
    for rank, part in zip(second.ranks, moved, strict=True):
        assert torch.equal(part["w"], shard(whole["w"], after, second, rank))


def _units(spec: P, mesh: Mesh, ndim: int) -> list[int]:
    found = [math.prod(mesh.axis_size(f) if isinstance(f, str) else units(f) for f in factors) for factors in spec.dims]
    return found + [1] * (ndim - len(found))


@given(st.data())
def test_padding_at_rest_is_zeros_that_unshard_cuts_off(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    spec, whole = data.draw(specs(mesh, len(shape), blocks=False)), numbered(shape)
    parts = [shard(whole, spec, mesh, rank, pad=True) for rank in mesh.ranks]
    padded = padded_shape(shape, spec, mesh)
    assert all(0 <= more - size < mesh.size for more, size in zip(padded, shape, strict=True))
    assert unshard(parts, spec, mesh).shape == padded
    assert unshard(parts, spec, mesh).sum() == whole.sum()
    assert torch.equal(unshard(parts, spec, mesh, shapes=whole.shape), whole)


def test_reshard_repads_for_the_new_mesh() -> None:
    whole = numbered((5, 2))
    parts = [shard(whole, P("data"), Mesh(data=2), rank, pad=True) for rank in range(2)]
    moved = reshard(parts, P("data"), Mesh(data=2), P("data"), Mesh(data=4), shapes=whole)
    assert [tuple(part.shape) for part in moved] == [(2, 2)] * 4
    assert torch.equal(unshard(moved, P("data"), Mesh(data=4), shapes=whole), whole)


def test_fused_query_key_value_is_split_by_heads() -> None:
    heads, size = 4, 2
    whole = torch.arange(3 * heads * size).reshape(3, heads, size)
    part = shard(whole.flatten(), "(3 heads/tensor dim)", Mesh(tensor=2), rank=1)
    assert torch.equal(part, whole[:, 2:].flatten())


@given(cases())
def test_plain_shards_are_views(case: tuple[Mesh, P, torch.Tensor]) -> None:
    mesh, spec, whole = case
    if all(isinstance(factor, str) for factors in spec.dims for factor in factors) and whole.numel():
        major_first = all(placement.outer == 1 for placement in spec.placements(mesh))
        part = shard(whole, spec, mesh, mesh.size - 1)
        assert not major_first or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_partial_sums_are_summed_and_sharded_once() -> None:
    parts = [torch.tensor([float(rank)]) for rank in GRID.ranks]
    assert unshard(parts, P(unreduced={"data", "tensor"}), GRID).item() == 6
    assert unshard(parts, P("tensor", unreduced={"data"}), GRID).tolist() == [2, 4]


def test_only_tensors_are_cut() -> None:
    tree = {"w": numbered((4,)), "step": 3, "none": None}
    parts = [shard(tree, P("data"), Mesh(data=2), rank) for rank in range(2)]
    assert parts[1]["w"].tolist() == [3, 4] and parts[1]["step"] == 3 and parts[1]["none"] is None
    assert unshard(parts, P("data"), Mesh(data=2))["step"] == 3


# -----------------------------------------------------------------------------
# Refusals
# -----------------------------------------------------------------------------


def test_check_compares_replicas_bit_by_bit_and_names_leaf_and_ranks() -> None:
    same = {"w": torch.tensor([float("nan"), 0.0]), "b": torch.ones(())}
    unshard([same] * 4, P(), GRID, check=True)
    other = {"w": torch.tensor([float("nan"), -0.0]), "b": torch.ones(())}
    with pytest.raises(SpecError, match=r"w: P\(\) on .*: ranks \[3\] hold other values than rank 0") as caught:
        unshard([same, same, same, other], P(), GRID, check=True)
    assert "  b:" not in str(caught.value)
    unshard([same, same, same, other], {"w": P(unreduced={"data", "tensor"}), "b": P()}, GRID, check=True)


def test_a_missing_rank_is_named_in_numbers() -> None:
    with pytest.raises(SpecError, match="has 4 ranks, got 3 trees"):
        unshard([torch.ones(1)] * 3, P("data"), GRID)


def test_one_error_lists_every_leaf_that_does_not_fit() -> None:
    tree = {"layers": [{"w": torch.ones(5, 4)}, {"w": torch.ones(4)}], "fine": torch.ones(4), "c": torch.ones(8)}
    wrong = {
        "layers": [{"w": P("data")}, {"w": P(None, "tensor")}],
        "fine": P(("data", "tensor")),
        "c": P((3, "model")),
    }
    with pytest.raises(SpecError) as caught:
        validate(tree, wrong, GRID)
    text = str(caught.value)
    assert (
        "layers/0/w: shape (5, 4), P('data'): dim 0 of size 5 does not divide by 'data' of 2 ranks; make it 6" in text
    )
    assert "layers/1/w: shape (4,), P(None, 'tensor'): the spec has 2 dims, the tensor has 1" in text
    assert "c: shape (8,), P((3, 'model')): dim 0 of size 8 does not divide by the factor 3; make it 9" in text
    assert "c: shape (8,), P((3, 'model')): the mesh has no axis 'model' (its axes: data, tensor)" in text
    assert "fine" not in text
    with pytest.raises(SpecError) as again:
        shard(tree, wrong, GRID, 0)
    assert str(again.value) == text + "\n  or pad storage layouts, with shard(…, pad=True)"
    with pytest.raises(SpecError) as inside:  # which nothing pads
        shard(tree["c"], wrong["c"], GRID, 0)
    assert "pad" not in str(inside.value)


def test_numbers_outside_an_axis_count_when_dividing() -> None:
    with pytest.raises(SpecError, match=r"size 2 does not divide by 'data' of 2 ranks \(with the .*, 4 blocks\)"):
        local_shape((2,), P((2, "data")), GRID)
    assert local_shape((4,), P((2, "data")), GRID) == (2,)


@given(st.data())
def test_validate_accepts_what_shard_accepts(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    spec = data.draw(specs(mesh, data.draw(st.integers(1, 3))))
    try:
        validate(numbered(shape), spec, mesh)
    except SpecError:
        with pytest.raises(SpecError):
            local_shape(shape, spec, mesh)
    else:
        shard(numbered(shape), spec, mesh, mesh.size - 1)


@given(st.data())
def test_every_fitting_shape_is_legal(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh, 2))
    validate(numbered(data.draw(fitting_shapes(spec, mesh, 2, least=0))), spec, mesh)


def test_an_inner_factor_is_not_padded() -> None:
    with pytest.raises(
        SpecError, match=r"does not divide by the factor 3; make it 6, shard another dim, or replicate it"
    ):
        shard(numbered((5,)), P((3, "data")), GRID, 0, pad=True)
    assert shard(numbered((6,)), P((3, "data")), GRID, 0, pad=True).tolist() == [1, 3, 5]


@given(length=st.integers(1, 13), sizes=st.tuples(*[st.integers(1, 3)] * 3))
def test_each_axis_of_a_padded_dim_pads_the_block_that_it_splits(length: int, sizes: tuple[int, ...]) -> None:
    mesh = Mesh(dict(zip("abc", sizes, strict=True)))
    spec, x = P(("a", "b", "c")).fitted((length, 2), mesh), torch.arange(1, 2 * length + 1).view(length, 2)
    parts = [shard_leaf(x, spec, mesh, rank) for rank in mesh.ranks]
    assert torch.equal(unshard_leaf(parts, spec, mesh), x)
    firsts = [mesh.rank({"a": rank, "b": 0, "c": 0}) for rank in range(sizes[0])]
    inner = [shard_leaf(x, P("a"), mesh, rank, pad=True) for rank in firsts]
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        assert torch.equal(parts[rank], shard_leaf(inner[at["a"]], P(("b", "c")), mesh, rank, pad=True))
        for whole, local in rank_boxes(x.shape, spec, mesh, at):
            rows = slice(whole.start[0], whole.start[0] + whole.size[0])
            assert torch.equal(x[rows], parts[rank][local.start[0] : local.start[0] + local.size[0]])
            assert at in list(holders(whole, x.shape, spec, mesh))
    for row in range(length):
        (found,) = holders(Box((row, 0), (1, 2)), x.shape, spec, mesh)
        assert any(torch.equal(x[row], each) for each in parts[mesh.rank(found)])
