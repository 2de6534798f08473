"""Types of values, which record one state per mesh axis, and type rules of the primitives.

=============  =====================================  ================  =====================
state          values of the ranks along the axis     gradient's state  casts without sending
=============  =====================================  ================  =====================
Varying V      may differ                             V                 → U
Invariant I    equal                                  I                 → V, → R
Unreduced U    partial sums                           R                 none
Reduced R      equal, gradient wanted unreduced       U                 → V
Owned O        one rank holds it, the others nothing  O                 none
=============  =====================================  ================  =====================

The states and transitions are the same as in JAX's shard_map (jax-ml/jax, `jax/_src/lax/parallel.py`). The exception is
`pbroadcast`: its result is Invariant here, because its value is equal on all ranks. JAX has no Owned values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from itertools import product

from ..errors import CollectiveTypeError

Param = int | str | Sequence[int]  # argument of a primitive after its axes: a dim, a rank, a state or pairs of ranks


class State(str, Enum):
    VARYING = "varying"
    INVARIANT = "invariant"
    UNREDUCED = "unreduced"
    REDUCED = "reduced"
    OWNED = "owned"

    @property
    def letter(self) -> str:
        return self.value[0].upper()

    @property
    def dual(self) -> State:
        return _DUAL.get(self, self)

    def __str__(self) -> str:
        return self.value


_V, _I, _U, _R, _O = State.VARYING, State.INVARIANT, State.UNREDUCED, State.REDUCED, State.OWNED
_DUAL = {_U: _R, _R: _U}
HOLDING = {
    _V: "every rank may hold a different value",
    _I: "every rank holds the same value already",
    _U: "the ranks hold partial sums",
    _R: "every rank holds the same value already",
    _O: "one rank holds the value, and the others hold nothing",
}


class Type(Mapping[str, State]):
    """State of a value on every mesh axis, such as {V:data, U:tensor}. Axes that are not listed are Invariant."""

    __slots__ = ("_states",)

    def __init__(self, states: Mapping[str, State | str] | None = None, /, **more: State | str) -> None:
        given = {**(states or {}), **more}
        self._states = {axis: State(state) for axis, state in given.items() if State(state) is not _I}

    def __getitem__(self, axis: str) -> State:
        return self._states.get(axis, _I)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, axis: object) -> bool:
        return axis in self._states

    def axes(self, state: State) -> frozenset[str]:
        """Return the axes where the value is in `state`. Empty for Invariant, because those axes are not stored."""
        return frozenset(axis for axis, held in self._states.items() if held is state)

    def having(self, axes: Iterable[str], state: State) -> Type:
        return Type({**self._states, **dict.fromkeys(axes, state)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Type) and self._states == other._states

    def __hash__(self) -> int:
        return hash(frozenset(self._states.items()))

    def __repr__(self) -> str:
        named = ((state, [axis for axis in self._states if self._states[axis] is state]) for state in (_V, _U, _R, _O))
        return "{" + ", ".join(f"{state.letter}:{'+'.join(axes)}" for state, axes in named if axes) + "}"


def dual(type_: Type) -> Type:
    return Type({axis: state.dual for axis, state in type_.items()})


# --- Type rules: {state accepted on a named axis: state of the result} ---

_TO_INVARIANT = {_V: _I, _U: _I}
_RULES: dict[str, dict[State, State]] = {
    "psum": _TO_INVARIANT,
    "psum_scatter": {_V: _V, _U: _V},
    "pscatter": {_I: _V},
    "all_to_all": {_V: _V},
    "ppermute": {_V: _V},
    "pmax": {_V: _I},
    "pmin": {_V: _I},
    "pbroadcast": {_V: _I},
    "broadcast": {_O: _V},
    "scatter": {_O: _V},
    "gather": {_V: _O},
    "reduce": {_V: _O, _U: _O},
}
_GATHERED = {_V, _I, _R}
_CASTS = {(_I, _V), (_I, _R), (_R, _V), (_V, _U)}
_NONLINEAR = {"pmax", "pmin"}

_SLICE = "to keep one slice per rank write fp.pscatter(x, {axis!r}, dim), which sends nothing"
_SUM = "partial sums must be summed; write fp.psum(x, {axis!r})"
_FIXES = {  # by the collective, or "" for all others, and the state of its operand
    ("psum", _I): "a psum would multiply it by the number of ranks. A doubled psum? Drop one; "
    "if the product is meant, write x * fp.axis_size({axis!r})",
    ("psum", _R): "a psum would multiply it by the number of ranks; drop it, or write x * fp.axis_size({axis!r})",
    **dict.fromkeys([("pmean", _I), ("pmean", _R)], "their mean is that value; drop the pmean"),
    **dict.fromkeys([("psum_scatter", _I), ("scatter", _I)], _SLICE),
    ("psum_scatter", _R): "there is nothing to sum; use it as it is",
    ("all_gather", _I): "there is nothing to gather; use it as it is, or write fp.pvary(x, {axis!r}) first "
    "if a copy per rank is meant",
    ("all_gather", _R): "there is nothing to gather; use it as it is",
    ("all_gather", _U): "write fp.psum_scatter or fp.psum first",
    ("pscatter", _V): "a slice by rank of a value that differs by rank loses data; write fp.all_to_all, "
    "or gather first",
    ("pscatter", _U): "write fp.psum_scatter(x, {axis!r}, dim), which sums and keeps one slice",
    ("pscatter", _R): "write fp.pscatter of the Invariant value that it was cast from",
    **dict.fromkeys(product(("pmax", "pmin", "pbroadcast"), (_I, _R)), "drop it"),
    ("broadcast", _I): "drop it",
    ("pcast to invariant", _V): "no cast makes different values equal; write fp.psum, fp.pmax or "
    "fp.all_gather(x, {axis!r}, to='invariant')",
    ("pcast to reduced", _V): "no cast makes different values equal; write fp.all_gather(x, {axis!r}, to='reduced')",
    ("pcast to unreduced", _I): "as partial sums it would count once per rank; write "
    "fp.pcast(fp.pvary(x, {axis!r}), {axis!r}, to='unreduced') if that is meant",
    ("pcast to invariant", _R): "its gradient is still to be reduced; use the value that it was cast from",
    ("pcast to unreduced", _R): "as partial sums it would count once per rank",
    ("pcast to varying", _U): "partial sums must be summed; write fp.psum_scatter(x, {axis!r}, dim) or "
    "fp.psum(x, {axis!r})",
    **dict.fromkeys([("pcast to invariant", _U), ("pcast to reduced", _U)], _SUM),
    ("", _I): "write fp.pvary(x, {axis!r}) first if a copy per rank is meant",
    ("", _R): "write fp.pcast(x, {axis!r}, to='varying') first if a copy per rank is meant",
    ("", _U): "write fp.psum(x, {axis!r}) first: the sum must be complete here",
    ("", _V): "write fp.psum(x, {axis!r}) first",
    ("", _O): "only that rank computes with it; if all ranks need it, let all hold it: in_specs=P() of fp.shard_map",
}


def result_type(operation: str, operand: Type, axes: tuple[str, ...], **params: Param) -> Type:
    """Return the type of a result (of `axis_index`, for `Type()`). Only `src` and `dst` of the parameters matter."""
    if operation == "axis_index":
        return operand.having(axes, _V)
    if operation in _NONLINEAR:
        for axis in sorted(operand.axes(_U)):
            raise _mismatch(operation, axis, _U)
    source = source_state(operation, operand, axes, **params)
    if operation in ("pcast", "broadcast"):
        return operand.having(axes, State(params["dst"]))
    if operation == "all_gather":
        dst = State(params.get("dst", "varying"))
        if dst not in _GATHERED:
            raise CollectiveTypeError(f"all_gather to {dst.value!r}: it gathers to 'varying', 'invariant' or 'reduced'")
        return operand.having(axes, dst)
    return operand.having(axes, _RULES[operation][source])


def source_state(operation: str, operand: Type, axes: tuple[str, ...], **params: Param) -> State:
    """Return the one state of the operand on all `axes`, the meaning of `src="auto"`."""
    for axis in axes:
        _check_state(operation, axis, operand[axis], params)
    states = {operand[axis] for axis in axes}
    if len(states) > 1:
        found = ", ".join(f"{axis}: {operand[axis].name.capitalize()}" for axis in axes)
        raise CollectiveTypeError(
            f"{_called.get() or operation} over axes {axes}: the operand is in different states on them ({found}); "
            "write one call per state"
        )
    return states.pop()


_called: ContextVar[str | None] = ContextVar("collective that users call", default=None)


@contextmanager
def called(name: str) -> Iterator[None]:
    """Name a collective that is built from another collective, for messages."""
    token = _called.set(name)
    try:
        yield
    finally:
        _called.reset(token)


def _check_state(operation: str, axis: str, state: State, params: Mapping[str, Param]) -> None:
    if operation == "pcast":
        _check_cast(axis, state, params)
        return
    accepted = {_V} if operation == "all_gather" else set(_RULES[operation])
    if state not in accepted:
        raise _mismatch(_called.get() or operation, axis, state)
    declared = params.get("src", "auto")
    if declared != "auto" and State(declared) is not state:
        raise _mismatch(operation, axis, state, f"but the call declares it {declared}; leave src='auto'")


def _check_cast(axis: str, state: State, params: Mapping[str, Param]) -> None:
    declared, target = params.get("src", "auto"), State(params["dst"])
    if declared != "auto" and State(declared) is not state:
        raise _mismatch("pcast", axis, state, f"but the call declares it {declared}")
    if state is target:
        raise _mismatch("pcast", axis, state, f"a cast to {target} does nothing; drop it")
    if (state, target) not in _CASTS:
        raise _mismatch(f"pcast to {target}", axis, state)


def _mismatch(operation: str, axis: str, state: State, fix: str = "") -> CollectiveTypeError:
    name, fix = state.name.capitalize(), fix or _FIXES.get((operation, state), _FIXES["", state])
    return CollectiveTypeError(
        f"{operation} over axis {axis!r}: the operand is {name} there ({HOLDING[state]}); {fix.format(axis=axis)}"
    )
