"""⟨A x, y⟩ = ⟨x, Aᵀ y⟩ for every collective, in compiled programs on simulated ranks and on gloo processes.

`test_primitives` has the law on the vmap oracle. Every group of ranks is checked separately; all numbers are integers.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_parallel.collectives import State, Type, dual
from functional_parallel.ir.eval_node import explicit_casts
from functional_parallel.lowering import UNCHECKED, lower
from functional_parallel.runtime import communicator
from functional_parallel.runtime.simulated import SimulatedRuntime
from sharding_specs import Mesh, P
from tests.processes import run_on_processes

from .cases import AXES, CASES, Case, I, R, U, integers, same_everywhere

MESH = Mesh(a=2, b=2)
SHAPE = (4, 8)
EXACT = [case for case in CASES if case.name != "pmean"]  # its factor is checked by another test

Found = tuple[Tensor, Tensor]  # A x and Aᵀ y


def value_of(rank: int, shape: Any, state: State, axes: tuple[str, ...], seed: int) -> Tensor:
    """A rank's value; one that a state requires to be the same in a group is that of the group's first rank."""
    group = next(ranks for ranks in MESH.groups(axes) if rank in ranks)
    return integers(*shape, seed=100 * seed + (group[0] if same_everywhere(state) else rank))


def gradient_state(case: Case) -> State:
    return dual(Type({"a": case.gives}))["a"]


def both(case: Case, axes: tuple[str, ...], x: Tensor, y: Tensor) -> Found:
    with explicit_casts():
        result, pull = torch.func.vjp(lambda value: case.apply(value, axes), x)
        return result, pull(y)[0]


def result_shape(case: Case, axes: tuple[str, ...]) -> Any:
    size = len(MESH.groups(axes)[0])
    return case.reference([torch.zeros(SHAPE) for _ in range(size)])[0].shape


# -----------------------------------------------------------------------------
# Carriers
# -----------------------------------------------------------------------------


def simulated(case: Case, axes: tuple[str, ...]) -> list[Found]:
    """Each rank's results of the program that a body on shards compiles to."""
    states = [(case.takes, SHAPE), (gradient_state(case), result_shape(case, axes))]
    specs = tuple(spec_of(state, axes) for state, _ in states)
    stacked = [torch.zeros(stack_of(spec), *shape).double() for spec, (_, shape) in zip(specs, states, strict=True)]
    body = lambda x, y: both(case, axes, x[0], y[0])  # noqa: E731
    program = lower(body, MESH, tuple(stacked), (specs, UNCHECKED), name="adjoint").program
    handles = [
        [value_of(rank, shape, state, axes, seed)[None] for rank in MESH.ranks]
        for seed, (state, shape) in enumerate(states)
    ]
    results, pulled = SimulatedRuntime(MESH, deduplicate=False).run(program, handles)
    return list(zip(results, pulled, strict=True))


def spec_of(state: State, axes: tuple[str, ...]) -> P:
    """A value that has the state on `axes`, and differs along the others; stacked along a new dim 0."""
    varying = tuple(axis for axis in MESH.axis_names if axis not in axes or state not in (I, R, U))
    unreduced, reduced = (set(axes) if state is each else set() for each in (U, R))
    return P(varying, unreduced=unreduced, reduced=reduced)


def stack_of(spec: P) -> int:
    return 2 ** sum(map(len, spec.dim_axes()))


def on_processes(rank: int) -> dict[str, Found]:
    found = {}
    for reduction in ("fast", "ordered"):
        with communicator(MESH, reduction=reduction).bound():
            for axes, case in product(AXES, EXACT):
                x = value_of(rank, SHAPE, case.takes, axes, 0)
                y = value_of(rank, result_shape(case, axes), gradient_state(case), axes, 1)
                found[f"{reduction} {axes} {case}"] = both(case, axes, x, y)
    return found


# -----------------------------------------------------------------------------
# The law
# -----------------------------------------------------------------------------


def check(case: Case, axes: tuple[str, ...], found: list[Found]) -> None:
    for ranks in MESH.groups(axes):
        left = paired(
            case.gives, [(found[r][0], value_of(r, found[r][0].shape, gradient_state(case), axes, 1)) for r in ranks]
        )
        right = paired(case.takes, [(value_of(r, SHAPE, case.takes, axes, 0), found[r][1]) for r in ranks])
        assert left == right, f"{case} over {axes}, ranks {ranks}: {left} and {right}"
        assert left != 0, "an adjoint of zero would pass"


def paired(state: State, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The inner product of a value with its gradient over a group; an Invariant value counts once."""
    return sum((a * b).sum().item() for a, b in (pairs[:1] if state is I else pairs))


@pytest.mark.parametrize("axes", AXES, ids="".join)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_on_simulated_ranks(case: Case, axes: tuple[str, ...]) -> None:
    check(case, axes, simulated(case, axes))


def test_on_four_processes() -> None:
    by_rank = run_on_processes(on_processes, MESH.size)
    for reduction, axes, case in product(("fast", "ordered"), AXES, EXACT):
        check(case, axes, [found[f"{reduction} {axes} {case}"] for found in by_rank])
