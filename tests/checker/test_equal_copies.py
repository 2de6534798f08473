"""A sum or maximum over ranks of what all ranks hold alike is legal by type, and warned of."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import EqualCopiesWarning
from sharding_specs import Mesh, P

TP = Mesh(tensor=2)
X, W = torch.arange(16.0).reshape(4, 4), torch.ones(4, 4)
EQUAL = ("psum(", "psum_scatter(", "pmax(", "pmin(")


def gathered_then_summed(x: Tensor, w: Tensor) -> Tensor:
    return fp.psum(fp.all_gather(x, "tensor"), "tensor")


def gathered_then_scattered(x: Tensor, w: Tensor) -> Tensor:
    return fp.psum_scatter(fp.all_gather(x, "tensor"), "tensor")


def whole_logits_in_a_vocabulary_parallel_loss(x: Tensor, w: Tensor) -> Tensor:
    logits = fp.all_gather(fp.pvary(x[:1], "tensor") @ w, "tensor", dim=1)
    shifted = logits - fp.pmax(logits.detach().amax(1), "tensor")[:, None]
    return fp.psum(shifted.exp().sum(1), "tensor").log().sum()


def equal_copies_behind_a_cast(x: Tensor, w: Tensor) -> Tensor:
    return x @ fp.psum(fp.pvary(w.sum(1, keepdim=True), "tensor"), "tensor")


def sum_of_a_cast(x: Tensor, w: Tensor) -> Tensor:
    return fp.psum(fp.pvary(w, "tensor"), "tensor")


PLANTED = [
    (gathered_then_summed, (P("tensor"), P()), P(), 1),
    (gathered_then_scattered, (P("tensor"), P()), P("tensor"), 1),
    (whole_logits_in_a_vocabulary_parallel_loss, (P(), P(None, "tensor")), P(), 2),
    (equal_copies_behind_a_cast, (P("tensor"), P()), P("tensor"), 1),
    (sum_of_a_cast, (P("tensor"), P()), P(), 1),
]


@pytest.mark.parametrize(("body", "in_specs", "out_specs", "count"), PLANTED)
@pytest.mark.parametrize("within", ["alone", "a plan", "a derivative"])
def test_a_planted_bug_is_named_with_its_line(
    body: Callable[..., Any], in_specs: Any, out_specs: Any, count: int, within: str
) -> None:
    f = fp.shard_map(body, TP, in_specs, out_specs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if within == "alone":
            f(X, W)
        elif within == "a plan":
            mesh = Mesh(data=2, tensor=2)
            f = fp.shard_map(body, mesh, in_specs, out_specs)
            fp.compile(fp.data_parallel("data")(lambda w, x: f(x * 1, w).sum() + w.sum()), mesh)(W, X)
        else:
            torch.func.grad(lambda w, x: f(x, w).sum())(W, X)
    found = [each for each in caught if each.category is EqualCopiesWarning]
    assert len(found) == count
    for each in found:
        line = linecache.getline(__file__, each.lineno)
        assert each.filename == __file__ and any(name in line for name in EQUAL)
        assert "over axis 'tensor' of a value that is equal on all ranks by construction" in str(each.message)


def weighted_mean(x: Tensor, w: Tensor) -> Tensor:
    return fp.pmean(fp.all_gather(x, "tensor"), "tensor")[0] + fp.psum(fp.pvary(w[0], "tensor"), "tensor") / 2


def rank_dependent(x: Tensor, w: Tensor) -> Tensor:
    masked = torch.where(fp.axis_index("tensor") == 0, fp.pvary(w, "tensor"), 0)[:2]
    return fp.psum(masked, "tensor") + fp.pmax(x, "tensor")


def gradient_of_an_equal_value(x: Tensor, w: Tensor) -> Tensor:
    return fp.grad(lambda w: w.sum() + fp.psum((x @ w).sum(), "tensor"))(w)


@pytest.mark.parametrize("body", [weighted_mean, rank_dependent, gradient_of_an_equal_value])
@pytest.mark.parametrize("plan", [False, True])
def test_nothing_is_said_of_a_right_body(body: Callable[..., Any], plan: bool) -> None:
    mesh = Mesh(data=2, tensor=2)
    f = fp.shard_map(body, mesh, (P("tensor"), P()), P())
    if plan:
        fp.compile(fp.grad(fp.data_parallel("data")(lambda w, x: f(x @ W @ W.T, w).sum())), mesh)(W, X)
    else:
        f(X, W)


def test_nothing_is_said_of_what_a_plan_sums() -> None:
    """A plan sums counts and ones, which are equal on the ranks of an even batch."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        ones = w.new_ones(()).expand(x.shape[0])
        return ((x @ w).sum(1) * ones).sum() / ones.sum() + (x * 0 + 1).sum() + torch.ones_like(x).sum()

    fp.testing.assert_equivalent(loss, fp.zero(3, "data"), Mesh(data=2), W, X)
