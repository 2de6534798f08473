"""Specs as values: their string form, what two spellings mean, and what they say of each axis."""

from __future__ import annotations

import pickle

import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel.testing.strategies import meshes, specs
from sharding_specs import Mesh, P, Placement, SpecError, as_spec

from ..storages import STORAGES

MESH = Mesh(data=2, tensor=4)


@given(st.data())
def test_the_string_form_reads_back(data: st.DataObject) -> None:
    spec = data.draw(specs(data.draw(meshes()), 3))
    assert P.parse(str(spec)) == spec
    assert as_spec(str(spec)) == spec


@given(st.data())
def test_the_python_form_reads_back(data: st.DataObject) -> None:
    spec = data.draw(specs(data.draw(meshes()), 3, partial=True)).replace(storage=data.draw(STORAGES))
    assert eval(repr(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(eval(repr(spec))) == hash(spec)


@given(st.data())
def test_placements_determine_the_spec(data: st.DataObject) -> None:
    """Up to axes of one rank, whose place among the others on a dim says nothing."""
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh, 3))
    again = P.from_placements(spec.placements(mesh), mesh)
    assert set(again.placements(mesh)) == set(spec.placements(mesh))


@given(st.data())
def test_a_spec_is_what_it_says_of_some_axes_and_of_the_rest(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh, 2, partial=True)).replace(storage=data.draw(STORAGES))
    some = set(data.draw(st.permutations(mesh.axis_names))[:2])
    kept, dropped = spec.only(some), spec.without(some)
    assert kept.axes | dropped.axes == spec.axes and not kept.axes & dropped.axes
    assert kept.unreduced == spec.unreduced & some
    assert dropped.unreduced == spec.unreduced - some
    assert spec.without(()) == spec and spec.only(mesh.axis_names) == spec
    assert spec.dual().dual() == spec.in_compute() and spec.dual().reduced == spec.unreduced
    assert kept.storage == dropped.storage == spec.storage and spec.in_compute().storage == {}
    further = P().replace(storage=data.draw(STORAGES))
    assert spec.divided(further, mesh).storage == {**spec.storage, **further.storage}


def test_a_storage_that_nobody_registered_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"P\('data', memory='gone'\): no storage is registered as memory='gone'"
    ) as refused:
        P("data", memory="gone")
    assert "range='double'" in str(refused.value) and "register_storage" in str(refused.value)
    with pytest.raises(SpecError, match="no storage is registered as pad="):
        P("data", pad={0: 5})


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", P()),
        ("vocab/tensor embed", P("tensor", None)),
        ("batch/(data,tensor) time embed", P(("data", "tensor"))),
        ("batch/(data, tensor) time", P(("data", "tensor"))),
        ("embed (3 heads/tensor dim)", P(None, (3, "tensor"))),
        ("(heads/tensor dim) embed", P("tensor")),
        ("layers/pipe embed heads/tensor dim", P("pipe", None, "tensor")),
        ("batch/data ...", P("data")),
        ("1 _/tensor", P(None, "tensor")),
    ],
)
def test_strings_mean(text: str, spec: P) -> None:
    assert P.parse(text) == spec


def test_a_named_factor_outside_a_sharded_one_takes_its_size_from_the_caller() -> None:
    assert P.parse("(parts heads/tensor dim)", parts=3) == P((3, "tensor"))


def test_trailing_whole_dims_and_blocks_inside_the_last_axis_say_nothing() -> None:
    assert P("data", None, None) == P("data") == P(("data", 5)) == P((1, "data"))
    assert P(None) == P() and hash(P(None)) == hash(P())
    assert P("data") != P(None, "data") and P((2, "data")) != P("data")
    assert P("data") != P(unreduced={"data"}) != P(reduced={"data"})


def test_the_first_axis_of_a_dim_is_major() -> None:
    assert P(("data", "tensor")).placements(MESH) == (Placement("data", 0, 1), Placement("tensor", 0, 2))
    assert P(None, (3, "tensor", "data")).placements(MESH) == (Placement("tensor", 1, 3), Placement("data", 1, 12))


def test_a_spec_is_one_leaf_of_a_pytree() -> None:
    assert optree.tree_leaves({"w": P("data", ("pipe", "tensor"))}) == [P("data", ("pipe", "tensor"))]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: P("data", "data"), "uses the axis 'data' twice"),
        (lambda: P("data", unreduced={"data"}), "uses the axis 'data' twice"),
        (lambda: P(unreduced="data", reduced="data"), "uses the axis 'data' twice"),
        (lambda: P(2.5), "a dim must be None, an axis name, or a tuple .*; got 2.5"),
        (lambda: P(("data", 0)), "got .*'data', 0"),
        (lambda: P(True), "got True"),
        (lambda: P.parse("a/ b"), "a '/' must be between"),
        (lambda: P.parse("a/(x,) b"), r"'a/\(x,\)' does not read"),
        (lambda: P.parse("a a"), "duplicate dimension"),
        (lambda: P.parse("(a b"), "not an einops pattern"),
        (lambda: P.parse("... b/tensor"), "name every dim"),
        (lambda: P.parse("(a b/tensor)"), r"'a' is outside a sharded factor.*write the number.*P.parse\(text, a=…\)"),
        (lambda: P.parse("(a/data b/tensor)"), r"give both axes to one factor, 'name/\(outer,inner\)'"),
        (lambda: as_spec(7), "not 7"),
        (
            lambda: P.from_placements([Placement("data", 0, 1), Placement("tensor", 0, 3)], MESH),
            "cut across other axes",
        ),
    ],
)
def test_errors_say_what_and_how_to_fix(wrong: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        wrong()  # type: ignore[operator]
