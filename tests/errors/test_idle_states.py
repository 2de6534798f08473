"""Specs of a plan with partial sums or owners have no effect, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError

PARAMS, X = {"w": torch.ones(4, 4)}, torch.ones(4, 4)
STATES = {"unreduced": lambda axis: P(unreduced={axis}), "owner": lambda axis: P(owner={axis: 0})}
PLANS = {
    "tensor_parallel": (lambda spec: fp.tensor_parallel("a", {"w": spec("a")}), "0/w: P"),
    "tensor_parallel, batch": (lambda spec: fp.tensor_parallel("a", {}, batch=spec("a")), "1: P"),
    "zero(1": (lambda spec: fp.zero(1, "a", {"w": spec("a")}), "0/w: P"),
    "zero(3": (lambda spec: fp.zero(3, "a", {"w": spec("a")}), "0/w: P"),
    "data_parallel": (lambda spec: fp.data_parallel("a", batch=spec("a")), "1: P"),
    "pipeline": (lambda spec: fp.pipeline("a", {"w": spec("a")}, microbatches=2), "0/w: P"),
    "accumulate": (lambda spec: fp.accumulate(2, batch=spec("microbatch")), "1: P"),
    "local_sgd": (lambda spec: fp.local_sgd("a", inner=2, batch=spec("a")), "0: P"),
    "tensor_parallel, from_specs": (lambda spec: fp.from_specs({"w": spec("a")}, Mesh(a=2)), "0/w: P"),
}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).sum()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_refuses_states_of_its_arguments(name: str, state: str) -> None:
    plan, where = PLANS[name]
    with pytest.raises(SpecError) as caught:
        fp.train_step(loss, fp.optim.sgd(0.1), Mesh(a=2), plan(STATES[state])).lower(PARAMS, X)
    said = str(caught.value)
    assert name.split(",")[0] in said and where in said and f"{state}=" in said and "no effect" in said


@pytest.mark.parametrize(
    "spec", [P(unreduced={"a"}), P(reduced={"a"}), P(owner={"a": 0}), P("a", padded={0: 3})], ids=repr
)
def test_a_constraint_refuses_all_but_dims(spec: P) -> None:
    plan = fp.data_parallel("a")(lambda params, x: fp.constrain(x @ params["w"], spec).sum())
    with pytest.raises(SpecError, match=r"test_idle_states.py:\d+: constrain to P.* have no effect there"):
        fp.compile(plan, Mesh(a=2))(PARAMS, X)


def test_what_has_an_effect_is_taken() -> None:
    body = fp.shard_map(lambda w, x: fp.psum(x, "a") + w, Mesh(a=2), (P(), P(unreduced={"a"})), P())
    assert body(PARAMS["w"], X).eq(2).all()
    plan = fp.tensor_parallel("a", {"w": P(None, "a", unreduced={"b"})})  # other axes are ignored
    fp.compile(plan(loss), Mesh(a=2, b=2))(PARAMS, X)


BATCHES = [P("pipe"), (P("pipe"),), P("data"), P(), (P(), P())]
MICROBATCHED = {
    "pipeline": (fp.pipeline, Mesh(pipe=2)),
    "accumulate": (lambda axis, microbatches, batch: fp.accumulate(microbatches, batch=batch), Mesh(pipe=2)),
}


@pytest.mark.parametrize("batch", BATCHES, ids=repr)
@pytest.mark.parametrize("name", MICROBATCHED)
def test_specs_that_cut_nothing_into_microbatches_are_refused(name: str, batch: Any) -> None:
    make, mesh = MICROBATCHED[name]
    args = (X, X) if isinstance(batch, tuple) and len(batch) == 2 else (X,)
    plan = make("pipe", microbatches=2, batch=batch)
    with pytest.raises(SpecError, match=rf"{name}.*no argument is cut into microbatches.*write P\('microbatch'\)"):
        fp.compile(fp.grad(plan(lambda params, *x: loss(params, x[0]))), mesh)(PARAMS, *args)
