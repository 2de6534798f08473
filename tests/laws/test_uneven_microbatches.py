"""Microbatches of unequal length: functions that mix samples in every way are still those of the whole batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh

from .random_functions import INNER, Program, arguments, layouts, programs

ROWS = st.integers(3, INNER)


@settings(max_examples=8)
@given(f=programs(), rows=ROWS, microbatches=st.integers(2, 8), seed=st.integers(0, 1000), data=st.data())
def test_values_and_gradients(f: Program, rows: int, microbatches: int, seed: int, data: st.DataObject) -> None:
    params, x = arguments(seed)
    mesh = Mesh(tensor=data.draw(st.sampled_from([1, 2])))
    specs, _ = data.draw(layouts(mesh))
    plan = fp.chain(fp.tensor_parallel("tensor", specs), fp.accumulate(min(microbatches, rows)))
    fp.testing.assert_equivalent(f, plan, mesh, params, x[:rows], exact=True)


@settings(max_examples=8)
@given(
    f=programs(3),
    half=st.integers(2, 4),
    stage=st.integers(0, 3),
    microbatches=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_beside_ranks(f: Program, half: int, stage: int, microbatches: int, seed: int) -> None:
    params, x = arguments(seed)
    plan = fp.chain(fp.zero(stage, "data"), fp.accumulate(min(microbatches, half)))
    fp.testing.assert_equivalent(f, plan, Mesh(data=2), params, x[: 2 * half], exact=True)


@settings(max_examples=6)
@given(f=programs(3), rows=ROWS, microbatches=st.integers(2, 8), seed=st.integers(0, 99))
def test_gradients_of_the_batch(f: Program, rows: int, microbatches: int, seed: int) -> None:
    params, x = arguments(seed)
    step = fp.compile(fp.grad(fp.accumulate(min(microbatches, rows))(f), 1), Mesh())
    assert torch.equal(step(params, x[:rows]), fp.grad(f, 1)(params, x[:rows]))
