"""Every op of torch on partial sums in a body: refused, or the sum of its results is its result of the sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch.nn import functional

import functional_parallel as fp
from functional_parallel.errors import FalseRuleError, RuleError, TypingError
from functional_parallel.ir import as_real, tensor_operands
from functional_parallel.rules import registry
from sharding_specs import Mesh, P

from .test_torchs_ops import OPS, REFUSED, UNDEFINED, chosen, is_close, is_inexact, outcome

MESH = Mesh(axis=2)
SAMPLES = 2


@pytest.mark.every(7)
@pytest.mark.parametrize("name", sorted(OPS.keys() - UNDEFINED - REFUSED))
def test_an_op_refuses_partial_sums_or_is_linear_in_them(name: str) -> None:
    if torch.float64 not in OPS[name].supported_dtypes("cpu"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of its ops
        for sample in chosen(OPS[name], torch.float64, SAMPLES):
            check(OPS[name], (sample.input, *sample.args), sample.kwargs)


CONVOLUTIONS = {
    "1d": lambda *x: functional.conv1d(*x, padding=1),
    "2d": lambda *x: functional.conv2d(*(each[..., None] for each in x[:2]), x[2]),
    "3d": lambda *x: functional.conv3d(*(each[..., None, None] for each in x[:2]), x[2]),
    "transposed": lambda *x: functional.conv_transpose1d(*x, stride=2),
    "grouped": lambda x, w, b: functional.conv1d(x, w[:, :1], b, groups=4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_adds_its_bias_once(name: str) -> None:
    f, values = CONVOLUTIONS[name], (integers(2, 4, 5), integers(4, 4, 3), integers(4))
    assert check(f, values) == 0  # of three operands
    assert check(lambda x, w: f(x, w, None), values[:2]) == 2


def check(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> int:
    """Give each operand as partial sums; return the number of operands for which the types allow it."""
    leaves, tree = optree.tree_flatten((args, kwargs or {}))
    where = [index for index, leaf in enumerate(leaves) if is_inexact(leaf)]
    return sum(is_allowed_and_right(f, leaves, tree, index) for index in where)


def is_allowed_and_right(f: Callable[..., Any], leaves: list[Any], tree: Any, index: int) -> bool:
    whole = [rounded(leaf) if is_inexact(leaf) else leaf for leaf in leaves]

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = optree.tree_unflatten(tree, [x if each == index else leaf for each, leaf in enumerate(whole)])
        return [each for each in optree.tree_leaves(f(*args, **kwargs)) if is_inexact(each)]

    summands = torch.stack([integers(*whole[index].shape).to(whole[index].dtype)] * 2)
    summands[1] = whole[index] - summands[0]
    wanted = outcome(call, [whole[index]])
    if not wanted or not all(each.layout is torch.strided and each.isfinite().all() for each in wanted):
        return False  # torch refuses its own sample, or nothing can be compared

    @fp.shard_map(MESH, in_specs=P("axis"), out_specs=P())
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        found = call(fp.pcast(x[0], "axis", to="unreduced"))
        return [fp.psum(each, "axis") for each in found]

    try:
        found = body(summands)
    except TypingError:
        return False
    for mine, right in zip(found, wanted, strict=True):
        same = torch.equal if torch.equal(right, rounded(right)) else is_close
        assert same(mine, right), (index, mine, right)
    return True


def rounded(x: torch.Tensor) -> torch.Tensor:
    if not x.isfinite().all():
        return x.detach()
    return torch.view_as_complex(as_real(x.detach()).round()) if x.is_complex() else x.detach().round()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).double()


# -----------------------------------------------------------------------------
# Rules with too few patterns
# -----------------------------------------------------------------------------

LIBRARY = torch.library.Library("unreduced_operands_tests", "DEF")
LIBRARY.define("affine(Tensor x, Tensor w, Tensor b) -> Tensor")
LIBRARY.impl("affine", lambda x, w, b: x * w + b, "CompositeExplicitAutograd")
torch.library.register_fake("unreduced_operands_tests::affine", lambda x, w, b: torch.empty_like(x), lib=LIBRARY)
affine = torch.ops.unreduced_operands_tests.affine


@pytest.fixture
def short_rule() -> Iterator[None]:
    fp.register_rule(affine, "~..., ~... -> ...")
    yield
    del registry._rules[affine.default]


@pytest.mark.usefixtures("short_rule")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_rule_with_fewer_patterns_than_operands_is_refused(index: int) -> None:
    with pytest.raises(RuleError, match=r"2 patterns for 3 tensor operands .*write one for each"):
        others = [integers(2), integers(2)]
        check(lambda x: affine(*others[:index], x, *others[index:]), (integers(2),))


@pytest.mark.usefixtures("short_rule")
def test_check_rule_sees_a_rule_with_fewer_patterns_than_operands() -> None:
    with pytest.raises(RuleError, match=r"2 patterns for 3 tensor operands"):
        fp.testing.check_rule(affine.default, [(integers(6), integers(6), integers(6))])


def test_check_rule_sees_a_mark_that_only_a_partition_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition splits the bias of a convolution off; a body on shards does not."""
    rule = registry.Rule(
        lambda node: ", ".join(["~n c^ s^", "~co c^ k^", "co"][: len(tensor_operands(node))]) + " -> n co new"
    )
    monkeypatch.setitem(registry._rules, torch.ops.aten.convolution.default, rule)
    sample = (integers(6, 6, 6), integers(6, 6, 3), integers(6), [1], [0], [1], False, [0], 1)
    with pytest.raises(FalseRuleError, match="mark ~ of operand 0"):
        fp.testing.check_rule(torch.ops.aten.convolution.default, [sample])
