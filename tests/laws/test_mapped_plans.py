"""A mapped plan is the mapped function: an ensemble on one batch, one model on several, any dims mapped."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.testing import strategies
from functional_parallel.testing.compare import compare
from sharding_specs import P

SPECS = {"w": P(None, "tensor"), "b": P("tensor"), "v": P("tensor")}
SHAPES = {"w": (3, 4), "b": (4,), "v": (4, 2)}
DERIVATIVES = {"grad": fp.grad, "grad_and_value": fp.grad_and_value, "value": lambda f: f}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] + params["b"]).relu() @ params["v"]).square().mean()


@settings(max_examples=24)
@given(
    plan_and_mesh=strategies.plans(SPECS),
    name=st.sampled_from(sorted(DERIVATIVES)),
    mapped=st.sets(st.sampled_from(["w", "b", "v", "x"]), min_size=1),
    data=st.data(),
)
def test_values_and_gradients(plan_and_mesh: Any, name: str, mapped: set[str], data: st.DataObject) -> None:
    plan, mesh = plan_and_mesh
    dims, args = {}, {}
    for key, shape in {**SHAPES, "x": (16, 3)}.items():
        dims[key] = data.draw(st.integers(-len(shape) - 1, len(shape))) if key in mapped else None
        whole = list(shape)
        if dims[key] is not None:
            whole.insert(dims[key] % (len(shape) + 1), 2)
        args[key] = data.draw(strategies.integers(tuple(whole)))
    x, of_x = args.pop("x"), dims.pop("x")
    step = fp.compile(fp.vmap(DERIVATIVES[name](plan(loss)), (dims, of_x)), mesh)
    wanted = torch.func.vmap(DERIVATIVES[name](loss), (dims, of_x))(args, x)
    compare(step(args, x), wanted, f"{name} under {plan!r} on {mesh!r}", rtol=1e-12)
