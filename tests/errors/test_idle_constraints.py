"""A constraint over an axis of the mesh that no transform of the plan splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError

PARAMS = {"w": torch.ones(4, 4), "v": torch.ones(4, 4)}
TENSOR = fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "v": P("tensor")})
PIPE = fp.pipeline("pipe", microbatches=2)
X = torch.ones(8, 4)

REFUSED = {
    "zero": (fp.zero(3, "data"), Mesh(data=2, tensor=2), r"zero\(3, 'data'\)"),
    "microbatches": (
        fp.chain(fp.data_parallel("data"), fp.accumulate(2)),
        Mesh(data=2, tensor=2),
        r"data_parallel\('data'\), accumulate\(2\)",
    ),
    "pipeline": (
        fp.chain(fp.data_parallel("data"), PIPE),
        Mesh(data=2, tensor=2, pipe=2),
        r"data_parallel\('data'\), pipeline\('pipe', .*\)",
    ),
    "two axes": (
        fp.chain(fp.zero(1, "shard"), fp.zero(3, "data")),
        Mesh(data=2, shard=1, tensor=2),
        r"zero\(1, 'shard'\)",
    ),
    "remat": (fp.remat(), Mesh(tensor=2), None),
}
ALLOWED = {
    "split": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
    "split by the outer of two": (fp.chain(fp.zero(3, "data"), fp.zero(1, "tensor")), Mesh(data=2, tensor=2)),
    "split in a pipeline": (fp.chain(TENSOR, fp.zero(1, "data"), PIPE), Mesh(data=2, tensor=2, pipe=2)),
    "one rank": (fp.zero(3, "data"), Mesh(data=2, tensor=1)),
    "another mesh": (fp.zero(3, "data"), Mesh(data=2)),
    "the batch's axis": (fp.zero(3, "tensor"), Mesh(tensor=2)),
}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = fp.constrain(torch.tanh(x @ params["w"]), P(None, "tensor"))
    return torch.tanh(h @ params["v"]).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    plan, mesh, transforms = REFUSED[name]
    listed = rf"transforms are: {transforms}" if transforms else r"The plan splits no axis\."
    line = loss.__code__.co_firstlineno + 1
    said = (
        rf"(?s)^test_idle_constraints.py:{line}: constrain to P\(None, 'tensor'\) has no effect, because no transform"
    )
    said += rf".* splits 'tensor', an axis of 2 ranks of {'Mesh'}.*{listed}"
    with pytest.raises(SpecError, match=said):
        fp.compile(fp.grad(plan(loss)), mesh).lower(PARAMS, X)
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan)
    with pytest.raises(SpecError, match=said):
        train.lower(PARAMS, X)


@pytest.mark.parametrize("name", ALLOWED)
def test_it_is_allowed(name: str) -> None:
    plan, mesh = ALLOWED[name]
    found, wanted = fp.compile(fp.grad(plan(loss)), mesh)(PARAMS, X), fp.grad(loss)(PARAMS, X)
    assert all(torch.allclose(found[key], wanted[key], rtol=1e-5) for key in wanted)


def test_outside_a_plan_it_is_the_identity() -> None:
    x = torch.ones(2, 4)
    assert fp.constrain(x, P(None, "tensor")) is x
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(tensor=2))
    train(train.init(PARAMS), X)
    fp.compile(fp.grad(loss), Mesh(tensor=2), in_specs=(P(), P()), out_specs=P())(PARAMS, X)


def test_a_body_that_splits_the_axis_itself() -> None:
    """Its values are shards already, so its constraints are the identity, in a plan and without one."""
    half = fp.shard_map(
        lambda x: fp.constrain(2 * x, P("tensor")), Mesh(tensor=2), in_specs=P("tensor"), out_specs=P("tensor")
    )

    def with_body(params: Any, x: torch.Tensor) -> torch.Tensor:
        return half(x @ params["w"]).sum()

    assert half(X).sum() == 2 * X.sum()
    inside = fp.compile(fp.zero(3, "data")(with_body), Mesh(data=2, tensor=2))
    assert inside(PARAMS, X) == with_body(PARAMS, X)
