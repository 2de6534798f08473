"""A rule that lies is found: `assert_equivalent` names the op whose value, gathered whole, is the first to differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import NotEquivalentError
from functional_parallel.testing import assert_equivalent
from sharding_specs import Mesh, P

LIBRARY = torch.library.Library("wrong_rules", "DEF")
LIBRARY.define("square(Tensor x) -> Tensor")
LIBRARY.impl("square", lambda x: x * x, "CompositeExplicitAutograd")
torch.library.register_fake("wrong_rules::square", torch.empty_like, lib=LIBRARY)
OP = torch.ops.wrong_rules.square


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return OP(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    fp.register_rule(OP, "... -> ...", function=Square.apply)


def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
    h = torch.relu(x @ params["first"])
    h = Square.apply(h @ params["second"])
    return F.cross_entropy(h @ params["third"], labels)


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 6, generator=generator).double() for name in ("first", "second", "third")}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator).double(), torch.arange(8) % 6


TENSOR = fp.tensor_parallel("tensor", {"first": P(None, "tensor"), "second": P("tensor"), "third": P()})
PLANS = {
    "one axis": TENSOR,
    "zero 3": fp.chain(fp.remat(), TENSOR, fp.zero(3, "data")),
    "microbatches": fp.chain(TENSOR, fp.data_parallel("data"), fp.accumulate(2)),
    "a pipeline": fp.chain(TENSOR, fp.pipeline("data", microbatches=2)),
}
MESH = Mesh(data=2, tensor=2)


@pytest.mark.parametrize("plan", PLANS)
def test_the_op_of_a_wrong_mark_is_named(plan: str) -> None:
    fp.register_rule(OP, "... -> ...", function=Square.apply)
    assert_equivalent(loss, PLANS[plan], MESH, params(), *batch())
    fp.register_rule(OP, "~... -> ...", function=Square.apply)  # of partial sums it would square each
    message = (
        r"value under.*\nIt begins with wrong_rules.square.default at test_wrong_rules.py:\d+ \(return OP\(x\)\): at"
    )
    with pytest.raises(NotEquivalentError, match=message):
        assert_equivalent(loss, PLANS[plan], MESH, params(), *batch())


def test_a_wrong_local_is_named() -> None:
    fp.register_rule(OP, "... -> ...", lambda step, x: step.run(x) + 1, function=Square.apply)
    with pytest.raises(
        NotEquivalentError, match=r"It begins with wrong_rules.square.default at .*check this op's rule"
    ):
        assert_equivalent(loss, fp.data_parallel("data"), MESH, params(), *batch())


def test_where_values_are_right_it_is_a_derivative() -> None:
    fp.register_rule(OP, "... -> ...", lambda step, x: step.run(x).detach(), function=Square.apply)
    with pytest.raises(NotEquivalentError, match=r"leaf first: .*\nThe \d+ values before the loss are right, so a"):
        assert_equivalent(loss, fp.data_parallel("data"), MESH, params(), *batch())


def test_a_plan_that_returns_scalars_alone_says_so() -> None:
    def scalars_only(f: Any) -> Any:
        def call(*args: Any) -> Any:
            result = f(*args)
            if not isinstance(result, Tensor):
                raise TypeError("one scalar is what this plan is for")
            return result

        return fp.data_parallel("data")(call)

    fp.register_rule(OP, "... -> ...", lambda step, x: step.run(x) + 1, function=Square.apply)
    with pytest.raises(NotEquivalentError, match=r"is unknown, because the plan refuses .*: one scalar is what"):
        assert_equivalent(loss, scalars_only, MESH, params(), *batch())
