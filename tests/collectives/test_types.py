"""What each primitive does to a type, and what it says about one that does not fit."""

from __future__ import annotations

import pytest

from functional_parallel.collectives import State, Type, dual, result_type
from functional_parallel.collectives.types import source_state
from functional_parallel.errors import CollectiveTypeError

from .cases import I, O, R, U, V

ACCEPTED = [
    ("psum", {}, V, I),
    ("psum", {}, U, I),
    ("psum_scatter", {"dim": 0}, V, V),
    ("psum_scatter", {"dim": 0}, U, V),
    ("all_gather", {"dst": "varying"}, V, V),
    ("all_gather", {"dst": "invariant"}, V, I),
    ("all_gather", {"dst": "reduced"}, V, R),
    ("pscatter", {}, I, V),
    ("all_to_all", {}, V, V),
    ("ppermute", {}, V, V),
    ("pmax", {}, V, I),
    ("pmin", {}, V, I),
    ("pbroadcast", {}, V, I),
    ("broadcast", {"dst": "varying"}, O, V),
    ("broadcast", {"dst": "invariant"}, O, I),
    ("broadcast", {"dst": "reduced"}, O, R),
    ("scatter", {}, O, V),
    ("gather", {}, V, O),
    ("reduce", {}, V, O),
    ("reduce", {}, U, O),
    ("pcast", {"dst": "varying"}, I, V),
    ("pcast", {"dst": "reduced"}, I, R),
    ("pcast", {"dst": "varying"}, R, V),
    ("pcast", {"dst": "unreduced"}, V, U),
]


@pytest.mark.parametrize("operation, params, takes, gives", ACCEPTED)
def test_accepted(operation: str, params: dict[str, object], takes: State, gives: State) -> None:
    operand = Type({"a": takes, "other": V})
    assert result_type(operation, operand, ("a",), **params) == Type({"a": gives, "other": V})
    assert source_state(operation, operand, ("a",), **params) is takes


REFUSED = sorted(
    {
        (operation, params.get("dst", ""), state)
        for operation, params, _, _ in ACCEPTED
        for state in State
        if (operation, params.get("dst", ""), state)
        not in {(name, more.get("dst", ""), takes) for name, more, takes, _ in ACCEPTED}
    }
)


@pytest.mark.parametrize("operation, dst, state", REFUSED)
def test_everything_else_is_refused_with_a_fix(operation: str, dst: str, state: State) -> None:
    params = {"dst": dst} if dst else {}
    with pytest.raises(CollectiveTypeError) as caught:
        result_type(operation, Type({"a": state}), ("a",), **params)
    message = str(caught.value)
    assert operation in message and "'a'" in message and state.name.capitalize() in message
    assert any(word in message for word in ("fp.", "drop it", "use it as it is", "count once per rank", "cast from"))
    assert "{" not in message


@pytest.mark.parametrize(
    "operation, state, fix",
    [
        ("psum", O, "in_specs=P() of fp.shard_map"),
        ("psum", I, "x * fp.axis_size('a')"),
        ("psum_scatter", I, "fp.pscatter(x, 'a', dim)"),
        ("pscatter", U, "fp.psum_scatter(x, 'a', dim)"),
        ("all_gather", U, "fp.psum_scatter or fp.psum first"),
        ("ppermute", I, "fp.pvary(x, 'a') first"),
        ("pmax", U, "fp.psum(x, 'a') first"),
    ],
)
def test_the_fix_is_the_right_one(operation: str, state: State, fix: str) -> None:
    with pytest.raises(CollectiveTypeError) as caught:
        result_type(operation, Type({"a": state}), ("a",))
    assert fix in str(caught.value)


def test_axes_in_different_states_need_a_call_each() -> None:
    with pytest.raises(CollectiveTypeError, match="one call per state"):
        result_type("psum", Type(a="varying", b="unreduced"), ("a", "b"))


def test_a_declared_source_must_be_the_state_found() -> None:
    with pytest.raises(CollectiveTypeError, match="declares it unreduced"):
        result_type("psum", Type(a="varying"), ("a",), src="unreduced")


def test_nonlinear_primitives_take_no_partial_sums_on_any_axis() -> None:
    with pytest.raises(CollectiveTypeError, match="'b': the operand is Unreduced"):
        result_type("pmax", Type(a="varying", b="unreduced"), ("a",))
    assert result_type("all_to_all", Type(a="varying", b="unreduced"), ("a",))["b"] is U


def test_axis_index_varies() -> None:
    assert result_type("axis_index", Type(), ("a", "b")) == Type(a="varying", b="varying")


def test_types_are_values() -> None:
    type_ = Type(tensor="unreduced", data="varying")
    assert repr(type_) == "{V:data, U:tensor}"
    assert type_ == Type({"data": V, "tensor": U, "pipe": I}) and hash(type_) == hash(Type({"data": V, "tensor": U}))
    assert type_["pipe"] is I and "pipe" not in type_ and type_.axes(V) == {"data"}
    assert dual(dual(type_)) == type_ and dual(type_)["tensor"] is R
    assert type_.having(["tensor"], I) == Type(data="varying") != type_
