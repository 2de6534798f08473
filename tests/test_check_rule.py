"""`fp.testing.check_rule` finds every kind of false claim in a sharding rule, and accepts true rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import FalseRuleError, UncheckedRuleError
from functional_parallel.rules import registry
from functional_parallel.testing import check_rule

LIBRARY = torch.library.Library("check_rule_tests", "DEF")
ops = torch.ops.check_rule_tests
aten = torch.ops.aten


def define(signature: str, compute: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Define a library op whose derivative is that of the Python function that computes it."""
    name = signature.partition("(")[0]
    LIBRARY.define(signature)
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"check_rule_tests::{name}", like, lib=LIBRARY)


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * x


def scaled_sum(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(0)


def largest(x: Tensor) -> Tensor:
    return x.amax(0)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def squares(x: Tensor) -> Tensor:
    return (x + 1).square().sum(0)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


define("swiglu(Tensor x, Tensor gate) -> Tensor", swiglu, lambda x, gate: torch.empty_like(x))
define("scaled_sum(Tensor x, Tensor w) -> Tensor", scaled_sum, lambda x, w: x.new_empty(x.shape[1:]))
define("largest(Tensor x) -> Tensor", largest, lambda x: x.new_empty(x.shape[1:]))
define("centred(Tensor x) -> Tensor", centred, torch.empty_like)
define("squares(Tensor x) -> Tensor", squares, lambda x: x.new_empty(x.shape[1:]))
define("rows_of(Tensor table, Tensor index) -> Tensor", rows_of, lambda t, i: t.new_empty((*i.shape, *t.shape[1:])))

FUNCTIONS = {
    ops.swiglu: swiglu,
    ops.scaled_sum: scaled_sum,
    ops.largest: largest,
    ops.centred: centred,
    ops.squares: squares,
    ops.rows_of: rows_of,
}


def looked_up(step: Any, table: Tensor, index: Tensor) -> Tensor:
    if not step.splits("v"):
        return step.run(table, index)
    held, inside = step.held_positions(index)
    return torch.where(inside[:, None], table[held], 0)


def integers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).double()


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


INDEX = torch.tensor([0, 5, 2, 2, 4, 1])


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {op: rule for op, rule in registry._rules.items() if LIBRARY.ns not in str(op)}  # others' of these ops too
    registry._rules.clear()
    registry._rules.update(before)
    yield
    registry._rules.clear()
    registry._rules.update(before)


def register(op: Any, text: Any, local: Any = None) -> None:
    fp.register_rule(op, text, local, function=FUNCTIONS[op])


TRUE = [
    pytest.param(ops.swiglu, "~..., ... -> ...", None, (normal(6), normal(6)), id="swiglu, linear in x"),
    pytest.param(ops.scaled_sum, "~r+ c, ~r+ c -> c", None, (integers(6, 6), integers(6, 6)), id="a contraction"),
    pytest.param(ops.largest, "r> c -> c", None, (integers(6, 6),), id="a maximum"),
    pytest.param(ops.centred, "~r c^ -> r c", None, (normal(6, 6),), id="a replicated dim"),
    pytest.param(ops.squares, "r+ c -> c", None, (integers(6, 6),), id="a sum of squares"),
    pytest.param(ops.rows_of, "~v? d, n -> n d", looked_up, (integers(6, 6), INDEX), id="a lookup"),
]


@pytest.mark.parametrize(("op", "text", "local", "sample"), TRUE)
def test_a_true_rule_is_accepted(op: Any, text: str, local: Any, sample: Any) -> None:
    register(op, text, local)
    claims = check_rule(op.default, [sample])
    assert any("2 ranks" in claim for claim in claims) and any("3 ranks" in claim for claim in claims)
    assert any("unequal" in claim for claim in claims)


FALSE = [
    pytest.param(ops.swiglu, "~..., ~... -> ...", None, r"mark ~ of operand 1", id="a linear mark"),
    pytest.param(ops.swiglu, "&..., &... -> ...", None, r"mark & of operands 0, 1", id="a jointly linear mark"),
    pytest.param(ops.scaled_sum, "r> c, r> c -> c", None, r"factor r>", id="a maximum that is a sum"),
    pytest.param(ops.largest, "r+ c -> c", None, r"factor r\+", id="a sum that is a maximum"),
    pytest.param(ops.largest, "r< c -> c", None, r"factor r<", id="a minimum that is a maximum"),
    pytest.param(ops.largest, "r! c -> c", None, r"factor r!", id="a local that does not combine"),
    pytest.param(ops.centred, "r c -> r c", None, r"factor c", id="a dim that must be replicated"),
    pytest.param(ops.squares, "~r+ c -> c", None, r"mark ~ of operand 0", id="a linear mark of a sum of squares"),
    pytest.param(ops.rows_of, "~v? d, n -> n d", None, r"factor v\?", id="a lookup without masking"),
    pytest.param(ops.rows_of, "v d, n -> n v", None, r"dims|factor", id="a result of other factors"),
]
SAMPLES = {
    ops.swiglu: (normal(6, 6), normal(6, 6)),
    ops.scaled_sum: (integers(6, 6), integers(6, 6)),
    ops.largest: (integers(6, 6),),
    ops.centred: (normal(6, 6),),
    ops.squares: (integers(6, 6),),
    ops.rows_of: (integers(6, 6), INDEX),
}


@pytest.mark.parametrize(("op", "text", "local", "claim"), FALSE)
def test_a_false_claim_is_named(op: Any, text: str, local: Any, claim: str) -> None:
    register(op, text, local)
    with pytest.raises(FalseRuleError, match=claim) as caught:
        check_rule(op.default, [SAMPLES[op]])
    message = str(caught.value)
    assert repr(text) in message and "sample 0 (f64[6, 6]" in message


def test_the_message_names_rule_claim_sample_and_element() -> None:
    register(ops.swiglu, "~..., ~... -> ...")
    with pytest.raises(FalseRuleError) as caught:
        check_rule(ops.swiglu.default, [SAMPLES[ops.swiglu]])
    message = str(caught.value)
    assert message.startswith(
        "the rule '~..., ~... -> ...' of check_rule_tests.swiglu.default is false: mark ~ of operand 1 promises that "
        "the op is linear in it. With partial sums in operand 1 over 2 ranks, sample 0 (f64[6, 6], f64[6, 6]): "
        "result 0: at ("
    )
    assert message.endswith("Remove the mark")


@pytest.mark.parametrize("op", [aten.relu.default, aten.abs.default, aten.sqrt.default])
def test_a_positively_homogeneous_op_is_not_taken_for_linear(op: Any) -> None:
    """Summands in proportion to each other would pass: relu(x / 4) + relu(3 x / 4) is relu(x)."""
    fp.register_rule(op, "~... -> ...")
    with pytest.raises(FalseRuleError, match="mark ~"):
        check_rule(op, [(normal(6).abs() + 1,)])


def test_a_wrong_gradient_of_a_local_is_found() -> None:
    register(ops.centred, "r c^ -> r c", lambda step, x: step.run(x.detach()) if step.choice else step.run(x))
    with pytest.raises(FalseRuleError, match=r"factor r .*gradient of operand 0: at"):
        check_rule(ops.centred.default, [SAMPLES[ops.centred]])


def test_a_local_that_raises_is_reported_with_the_claim() -> None:
    def fails(step: Any, x: Tensor) -> Tensor:
        if step.splits("r"):
            raise KeyError("no such layout")
        return step.run(x)

    register(ops.centred, "r c^ -> r c", fails)
    with pytest.raises(FalseRuleError, match=r"factor r .*KeyError: 'no such layout'"):
        check_rule(ops.centred.default, [SAMPLES[ops.centred]])


def test_a_false_rule_of_unequal_parts_is_found() -> None:
    """A sample that two parts hold must count once: `counts` claims it, and this local does not."""
    register(ops.squares, "r+ c -> c")
    registry._rules[ops.squares.default] = registry.Rule("r+ c -> c", counts=True)
    with pytest.raises(FalseRuleError, match=r"factor r\+ .*unequal slices"):
        check_rule(ops.squares.default, [SAMPLES[ops.squares]])


def test_a_factor_that_no_sample_can_split_is_reported() -> None:
    register(ops.centred, "r c^ -> r c")
    with pytest.raises(UncheckedRuleError, match=r"factor r, with sizes 5; .*multiple of 2 or 3"):
        check_rule(ops.centred.default, [(normal(5, 6),)])
    assert check_rule(ops.centred.default, [(normal(5, 6),)], ranks=(5,))


def test_samples_may_be_a_hypothesis_strategy() -> None:
    register(ops.swiglu, "~..., ... -> ...")
    samples = st.sampled_from([2, 4]).map(lambda size: (normal(size), normal(size)))
    assert check_rule(ops.swiglu.default, samples, ranks=(2,))
    register(ops.swiglu, "~..., ~... -> ...")
    with pytest.raises(FalseRuleError, match="mark ~ of operand 1"):
        check_rule(ops.swiglu.default, st.just((normal(2), normal(2))), ranks=(2,))


def test_keyword_arguments_are_given_beside_the_others() -> None:
    assert check_rule(aten.var.correction, [((normal(6, 6), [0]), {"correction": 1, "keepdim": True})])


@pytest.mark.parametrize(
    ("op", "samples", "message"),
    [
        (swiglu, [], "takes an op.*not <function swiglu"),
        (ops.swiglu, [], r"takes one overload.*check_rule_tests\.swiglu\.default"),
        (ops.swiglu.default, [], "no rule; register one"),
        (aten.mm.default, [], "at least one sample"),
        (aten.mm.default, [normal(6, 6)], "sample 0 is a Tensor"),
        (aten.reshape.default, [(normal(6, 6), [36])], r"holds aten.view.default, not the op"),
    ],
)
def test_bad_input(op: Any, samples: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_rule(op, samples)
