"""Laws of meshes: coordinates and ranks are two names of one thing, and the groups of any axes partition the ranks."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel.testing.strategies import meshes
from sharding_specs import Mesh, MeshError


@given(meshes())
def test_ranks_and_coordinates_are_inverse(mesh: Mesh) -> None:
    seen = {tuple(mesh.coordinates(rank).values()) for rank in mesh.ranks}
    assert len(seen) == mesh.size
    assert all(mesh.rank(mesh.coordinates(rank)) == rank for rank in mesh.ranks)


def test_the_first_axis_is_outermost() -> None:
    mesh = Mesh(data=2, tensor=3)
    assert [mesh.coordinates(rank)["data"] for rank in mesh.ranks] == [0, 0, 0, 1, 1, 1]
    assert [mesh.coordinates(rank)["tensor"] for rank in mesh.ranks] == [0, 1, 2, 0, 1, 2]


@given(st.data())
def test_groups_partition_the_ranks_in_the_order_of_their_index(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = tuple(data.draw(st.permutations(mesh.axis_names))[: data.draw(st.integers(0, len(mesh.axis_names)))])
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
    for group in groups:
        assert [mesh.axis_index(rank, axes) for rank in group] == list(range(mesh.axis_size(axes)))
        others = [{n: i for n, i in mesh.coordinates(rank).items() if n not in axes} for rank in group]
        assert all(other == others[0] for other in others)


def test_inside_a_group_the_first_named_axis_is_major() -> None:
    mesh = Mesh(data=2, tensor=2)
    assert mesh.groups(("data", "tensor")) == [[0, 1, 2, 3]]
    assert mesh.groups(("tensor", "data")) == [[0, 2, 1, 3]]


@given(meshes())
def test_text_reads_back(mesh: Mesh) -> None:
    if mesh.axis_names:
        assert Mesh.parse(str(mesh)) == mesh
    assert eval(repr(mesh)) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert hash(Mesh(mesh.shape)) == hash(mesh)


def test_the_order_of_axes_is_part_of_a_mesh() -> None:
    assert Mesh(data=2, tensor=2) != Mesh(tensor=2, data=2)


def test_minus_one_takes_the_rest() -> None:
    assert Mesh.parse("data=-1, tensor=2").resolve(6) == Mesh(data=3, tensor=2)
    assert Mesh(data=2).resolve(2) == Mesh(data=2)
    assert Mesh().size == 1 and list(Mesh().ranks) == [0] and Mesh().groups(()) == [[0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Mesh(data=0), "'data' has size 0"),
        (lambda: Mesh(data="2"), "'data' has size '2'"),
        (lambda: Mesh({"a b": 2}), "'a b' cannot name a mesh axis"),
        (lambda: Mesh(data=-1, tensor=-1), "several -1"),
        (lambda: Mesh.parse("data:2"), "cannot read 'data:2'"),
        (lambda: Mesh.parse("data=2,data=4"), "'data' appears twice"),
        (lambda: Mesh(data=-1, tensor=4).resolve(6), "6 ranks.*take 4"),
        (lambda: Mesh(data=2).resolve(4), "has 2 ranks, but there are 4"),
        (lambda: Mesh(data=-1).size, r"not resolved; call .resolve\(world_size\)"),
        (lambda: Mesh(data=-1).groups("data"), "not resolved"),
        (lambda: Mesh(data=-1, tensor=2).axis_size("tensor"), "not resolved"),
        (lambda: Mesh(data=2).axis_size("tensor"), "no axis 'tensor'; its axes are: data"),
        (lambda: Mesh(data=2).groups(("data", "data")), "'data' is named twice"),
        (lambda: Mesh(data=2).coordinates(2), "rank 2 is not on .* ranks 0 to 1"),
        (lambda: Mesh(data=2).rank({"data": 2}), "data=2 lies outside"),
    ],
)
def test_errors_say_what_and_where(wrong: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        wrong()  # type: ignore[operator]


def test_ranks_on_some_of_the_processes() -> None:
    mesh = Mesh(data=3, ranks=[0, 2, 5])
    assert (mesh.size, [*mesh.ranks], [*mesh.processes]) == (3, [0, 1, 2], [0, 2, 5])
    assert repr(mesh) == "Mesh(data=3, ranks=[0, 2, 5])"
    assert mesh == Mesh({"data": 3}, ranks=[0, 2, 5])
    assert len({mesh, Mesh(data=3), Mesh(data=3, ranks=[0, 1, 2])}) == 3
    for ranks in ([0, 1], [0, 1, 1], [1, 0, 2], [-1, 0, 1]):
        with pytest.raises(MeshError, match="has 3 ranks; list the global rank of each, in ascending order"):
            Mesh(data=3, ranks=ranks)
