"""Every collective against the group's meaning, and its derivatives against the definition of an adjoint.

All numbers are integers in float64, so equal means equal.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel import collectives as fp
from functional_parallel import errors
from functional_parallel.collectives import Type, dual

from ..some_cases import one_in
from .cases import (
    AXES,
    CASES,
    SHAPE,
    SIZES,
    Case,
    I,
    V,
    by_group,
    integers,
    mapped_axes,
    over_mesh,
    pairing,
    same_everywhere,
    spread,
    stored,
)

# torch's forward-mode AD loads its decompositions through a torch.jit that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FULL = (*SIZES.values(), *SHAPE)
EXACT = [case for case in CASES if case.name != "pmean"]  # a third is not an integer

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_exact_case = pytest.mark.parametrize("case", EXACT, ids=str)
every_axes = pytest.mark.parametrize("axes", AXES, ids="".join)


def operand(case: Case, axes: tuple[str, ...], seed: int) -> torch.Tensor:
    return spread(integers(*FULL, seed=seed), case.takes, axes)


def run(case: Case, axes: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    mapped = over_mesh(lambda value: case.apply(value, axes), [mapped_axes(case.takes, axes)])
    return mapped(stored(x, case.takes, axes))


@every_case
@every_axes
def test_means_what_the_group_says(case: Case, axes: tuple[str, ...]) -> None:
    x = operand(case, axes, seed=0)
    torch.testing.assert_close(run(case, axes, x), by_group(case.reference, x, axes), rtol=1e-15, atol=0)


@every_case
@every_axes
def test_what_all_ranks_share_is_known_to_be_shared(case: Case, axes: tuple[str, ...]) -> None:
    """`out_dims=None` is accepted for the Invariant and Reduced results, and for no other."""
    x = stored(operand(case, axes, seed=0), case.takes, axes)
    fn = lambda value: case.apply(value, axes)  # noqa: E731
    for axis in reversed(SIZES):
        in_dim = 0 if axis in mapped_axes(case.takes, axes) else None
        out_dim = None if axis in axes and same_everywhere(case.gives) else 0
        fn = fp.vmap(fn, in_dims=in_dim, out_dims=out_dim, axis_name=axis, axis_size=SIZES[axis])
    fn(x)


@pytest.mark.parametrize("case", [case for case in CASES if not same_everywhere(case.gives)], ids=str)
def test_what_ranks_do_not_share_is_refused_as_shared(case: Case) -> None:
    shared = same_everywhere(case.takes)
    x = integers(*SHAPE, seed=0) if shared else integers(2, *SHAPE, seed=0)
    fn = fp.vmap(lambda row: case.apply(row, ("a",)), None if shared else 0, None, axis_name="a", axis_size=2)
    with pytest.raises(errors.CollectiveTypeError, match="out_dims=None says that it is the same"):
        fn(x)


@one_in(2, case=EXACT, axes=AXES)
@settings(max_examples=4)
@given(seed=st.integers(0, 1000))
def test_transpose_is_the_adjoint(case: Case, axes: tuple[str, ...], seed: int) -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩, where a value that is the same on all ranks counts once."""
    x = operand(case, axes, seed)
    result = run(case, axes, x)
    state_of_gradient = dual(Type({"a": case.gives}))["a"]
    y = spread(integers(*result.shape, seed=seed + 1), state_of_gradient, axes)

    def pull(value: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(lambda v: case.apply(v, axes), value)[1](cotangent)[0]

    pulled = over_mesh(pull, [mapped_axes(case.takes, axes), mapped_axes(state_of_gradient, axes)])
    transposed = pulled(stored(x, case.takes, axes), stored(y, state_of_gradient, axes))
    assert pairing(result, y, case.gives, axes) == pairing(x, transposed, case.takes, axes)


@every_exact_case
@every_axes
def test_jvp_is_the_collective_of_the_tangent(case: Case, axes: tuple[str, ...]) -> None:
    x, t = (operand(case, axes, seed) for seed in (2, 3))

    def push(value: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda v: case.apply(v, axes), (value,), (tangent,))[1]

    pushed = over_mesh(push, [mapped_axes(case.takes, axes)] * 2)
    tangent = pushed(stored(x, case.takes, axes), stored(t, case.takes, axes))
    assert torch.equal(tangent, by_group(case.reference, t, axes))


@one_in(3, case=EXACT, axes=AXES, dim=[0, 1, 2])
def test_vmap_over_an_unrelated_dim(case: Case, axes: tuple[str, ...], dim: int) -> None:
    batch = torch.stack([operand(case, axes, seed) for seed in (4, 5, 6)])

    def over_batch(values: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda value: case.apply(value, axes), in_dims=dim)(values)

    stacked = torch.stack([stored(x, case.takes, axes) for x in batch])
    leading = len(mapped_axes(case.takes, axes))
    placed = stacked.movedim(0, leading + dim)
    result = over_mesh(over_batch, [mapped_axes(case.takes, axes)])(placed)
    expected = torch.stack([by_group(case.reference, x, axes) for x in batch])
    assert torch.equal(result.movedim(2, 0), expected)


@pytest.mark.parametrize("case", [case for case in EXACT if case.takes is V and case.gives in (V, I)], ids=str)
@every_axes
def test_second_derivatives(case: Case, axes: tuple[str, ...]) -> None:
    """The gradient of ⟨gradient, v⟩ of a cubic loss over all ranks, against plain autograd of the group's meaning."""
    x, v = operand(case, axes, seed=7), integers(*FULL, seed=8)
    varies = mapped_axes(case.gives, axes)

    def loss(value: torch.Tensor) -> torch.Tensor:
        return total(case.apply(value, axes) ** 3, varies)

    def second(value: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        along = lambda at: total(torch.func.grad(loss)(at) * direction, tuple(SIZES))  # noqa: E731
        return torch.func.grad(along)(value)

    def global_loss(value: torch.Tensor) -> torch.Tensor:
        once = stored(by_group(case.reference, value, axes), case.gives, axes)
        return (once**3).sum()

    expected = torch.func.grad(lambda at: (torch.func.grad(global_loss)(at) * v).sum())(x)
    assert torch.equal(over_mesh(second, [tuple(SIZES)] * 2)(x, v), expected)


def total(value: torch.Tensor, varies: tuple[str, ...]) -> torch.Tensor:
    return fp.psum(value.sum(), varies) if varies else value.sum()


@every_exact_case
@every_axes
def test_autograd_outside_the_levels_agrees(case: Case, axes: tuple[str, ...]) -> None:
    """grad(vmap(f)) differentiates the arithmetic of the level itself, and must say the same as the transposes do."""
    x = operand(case, axes, seed=9)
    y = integers(*run(case, axes, x).shape, seed=10)
    ours = torch.func.grad(lambda at: (run(case, axes, at) * y).sum())(x)
    expected = torch.func.grad(lambda at: (by_group(case.reference, spread(at, case.takes, axes), axes) * y).sum())(x)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64, torch.bfloat16], ids=str)
@every_exact_case
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    x = spread((integers(*FULL, seed=11) % 3).to(dtype), case.takes, ("a",))
    counted = dtype == torch.bool and case.name in ("psum", "reduce") and case.takes is V
    expected = by_group(case.reference, x.to(torch.int64) if counted else x, ("a",))
    assert torch.equal(run(case, ("a",), x), expected)
