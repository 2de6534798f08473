"""Transforms are data: they print as code, compare, hash, become JSON, and keep nothing of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import functional_parallel as fp
from functional_parallel.functions import LocalFunction, PyTree, Resolved, SpecTree
from functional_parallel.requests import Order
from functional_parallel.transforms import Transform
from sharding_specs import Mesh, P

RULES = {"w*": P(None, "tensor"), "v": P("tensor", None)}
EACH = {
    "precision": lambda: fp.mixed_precision("bf16", keep="*b", islands=["exp"], loss_scale=fp.LossScale(window=7)),
    "remat": lambda: fp.remat(every=2),
    "budget": lambda: fp.remat(budget="8GiB"),
    "tensor": lambda: fp.tensor_parallel("tensor", dict(RULES), batch=P()),
    "tree": lambda: fp.tensor_parallel("tensor", {"w": [P(None, "tensor")], "v": P("tensor", reduced={"a"})}),
    "master": lambda: fp.data_parallel("data", master=1),
    "zero 1": lambda: fp.zero(1, "data", layout="flat"),
    "zero 3": lambda: fp.zero(3, "data", [("w*", P("data", padded={0: 5}))], whole_below=3, keep_gathered=True),
    "accumulate": lambda: fp.accumulate(4, batch=(P("microbatch"), None), reduce="each"),
    "pipeline": lambda: fp.pipeline("pipe", {"w": P("pipe")}, microbatches=2, schedule="interleaved", chunks=2),
    "replicas": lambda: fp.local_sgd("data", inner=3),
    "diloco": lambda: fp.diloco("data", inner=3),
}


@pytest.mark.parametrize("name", EACH)
def test_a_transform_is_its_arguments(name: str) -> None:
    one, two = EACH[name](), EACH[name]()
    assert one is not two and one == two and hash(one) == hash(two)
    assert repr(one).startswith("fp.") and eval(repr(one), {"fp": fp, "P": P}) == one
    assert fp.Plan.from_json(fp.chain(one).to_json()) == fp.chain(two)
    assert [one == EACH[other]() for other in EACH] == [other == name for other in EACH]


def test_a_chain_prints_as_code() -> None:
    plan = fp.chain(fp.remat("attention"), fp.tensor_parallel("tensor", {"w": P(None, "tensor")}), fp.zero(3, "data"))
    text = "fp.remat('attention'), fp.tensor_parallel('tensor', {'w': P(None, 'tensor')}), fp.zero(3, 'data')"
    assert repr(plan) == f"fp.chain({text})"
    assert eval(repr(plan), {"fp": fp, "P": P}) == plan and hash(plan) == hash(fp.Plan.from_json(plan.to_json()))


def kept(node: torch.fx.Node) -> bool:
    return "mm" in str(node.target)


def test_a_function_prints_by_its_name_and_is_no_json() -> None:
    plan = fp.chain(fp.remat(kept), fp.diloco("data", inner=2, outer=fp.optim.sgd(1.0)))
    assert repr(plan) == "fp.chain(fp.remat(kept), fp.diloco('data', inner=2, outer=Optimizer(sgd)))"
    assert fp.remat(kept) == fp.remat(kept) != fp.remat(lambda node: True)
    with pytest.raises(ValueError, match="'kept' is no data"):
        plan.to_json()
    with pytest.raises(ValueError, match="__import__"):
        fp.Plan.from_json('["__import__(\\"os\\").getcwd()"]')


# ---------------------------------------------------------------------------------------------------------------------
# Nothing of a call stays on a transform
# ---------------------------------------------------------------------------------------------------------------------


def layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    for i in range(params["w"].shape[0] if isinstance(params["w"], torch.Tensor) else len(params["w"])):
        x = x @ params["w"][i]
    return (x * params["b"]).sum()


def given(count: int, width: int = 4) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    make = torch.Generator().manual_seed(count)
    w = torch.randint(-2, 3, (count, width, width), generator=make).double()
    return {"w": w, "b": torch.ones(width).double()}, torch.randint(-2, 3, (4, width), generator=make).double()


USED = {
    "tensor": (lambda: fp.tensor_parallel("a", {"w": P(None, None, "a"), "b": P("a")}), Mesh(a=2)),
    "zero 0": (lambda: fp.data_parallel("a"), Mesh(a=2)),
    "zero 2": (lambda: fp.zero(2, "a"), Mesh(a=2)),
    "zero 3": (lambda: fp.zero(3, "a", {"w": P(None, "a")}), Mesh(a=2)),
    "accumulate": (lambda: fp.accumulate(2), Mesh()),
    "remat": (lambda: fp.remat(), Mesh()),
    "precision": (lambda: fp.mixed_precision("bf16", keep=["b"]), Mesh()),
    "pipeline": (lambda: fp.pipeline("a", {"w": P("a"), "b": P()}, microbatches=2), Mesh(a=2)),
    "replicas": (lambda: fp.local_sgd("a", inner=2), Mesh(a=2)),
}


@pytest.mark.parametrize("name", USED)
def test_a_transform_that_was_used_equals_a_new_one(name: str) -> None:
    make, mesh = USED[name]
    used, new = make(), make()
    before = repr(vars(used))
    for count in (2, 4):
        params, x = given(count)
        train = fp.train_step(layers, fp.optim.sgd(0.5), mesh, used)
        state, _ = train(train.init(params), x)
        train.params(state)
        train.compile(used(layers))(state, x)
    assert used == new and hash(used) == hash(new)
    assert repr(vars(used)) == before and vars(used).keys() == vars(new).keys()


def test_a_plan_that_met_stacks_of_another_length_takes_these() -> None:
    """Three layers are refused by two stages, and four are not, whatever the plan met before."""
    plan = fp.pipeline("pipe", {"w": P("pipe"), "b": P()}, microbatches=2)
    step = fp.compile(fp.grad_and_value(plan(layers)), Mesh(pipe=2))
    with pytest.raises(fp.errors.PipelineError, match=r"2 stages do not divide .* of w \(3 layers\)"):
        step(*given(3))
    for count in (4, 2):
        grads, value = step(*given(count))
        wanted, expected = fp.grad_and_value(layers)(*given(count))
        assert torch.equal(value, expected) and all(torch.equal(grads[key], wanted[key]) for key in wanted)


# ---------------------------------------------------------------------------------------------------------------------
# A transform of the user
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class scaled(Transform):
    """Multiply the loss by a factor."""

    factor: float
    order: ClassVar[Order] = Order.PRECISION

    def apply(self, f: LocalFunction) -> LocalFunction:
        def call(resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
            value, specs = f.run(resolved, *args)
            return value * self.factor, specs

        return f.then(call, describe=self.name)


def test_a_transform_outside_the_library() -> None:
    plan = fp.chain(scaled(3.0), fp.zero(3, "a"))
    assert repr(plan) == "fp.chain(scaled(3.0), fp.zero(3, 'a'))"
    assert plan == fp.chain(scaled(3.0), fp.zero(3, "a")) != fp.chain(scaled(2.0), fp.zero(3, "a"))
    assert fp.Plan.from_json(plan.to_json()) == plan
    params, x = given(2)
    value = fp.compile(plan(layers), Mesh(a=2))(params, x)
    assert torch.equal(value, 3 * layers(params, x))
    fp.testing.assert_equivalent(lambda p, x: 3 * layers(p, x), fp.zero(3, "a"), Mesh(a=2), params, x, exact=True)
