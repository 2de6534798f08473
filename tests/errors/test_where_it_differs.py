"""A result in another state than its spec declares: the message names the line since which it is in that state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import OutSpecError, TypingError
from sharding_specs import Mesh, P

MESH = Mesh(tensor=2)
X, W = torch.ones(4, 4), torch.ones(4, 4)


def sharded(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    w = w * 2
    h = x @ w
    h = h + fp.psum(h, "tensor")
    return {"loss": h.mean()}


def indexed(x: Tensor, w: Tensor) -> Tensor:
    scale = fp.axis_index("tensor") + 1
    return (w * scale).sum()


def partial(x: Tensor, w: Tensor) -> Tensor:
    summands = fp.pcast(x, "tensor", to="unreduced")
    return (summands * 2).sum()


CASES = [
    (sharded, "loss: differs by rank", r"`h = x @ w`, which reads argument 0"),
    (indexed, "the result: differs by rank", r"`scale = fp.axis_index\(\"tensor\"\) \+ 1`"),
    (partial, "the result: holds partial sums", r"`summands = .*`"),
]


@pytest.mark.parametrize(("body", "what", "line"), CASES)
def test_the_line_is_named(body: Callable[..., Any], what: str, line: str) -> None:
    state = "unreduced" if body is partial else "varying"
    said = rf"{what} along 'tensor'.*It is {state} along 'tensor' since test_where_it_differs.py:\d+: {line}"
    with pytest.raises(OutSpecError, match=said):
        fp.shard_map(body, MESH, (P("tensor"), P()), P())(X, W)


@pytest.mark.parametrize(("body", "what", "line"), CASES)
def test_the_line_is_named_in_a_plan(body: Callable[..., Any], what: str, line: str) -> None:
    mesh = Mesh(data=2, tensor=2)
    f = fp.shard_map(body, mesh, (P("tensor"), P()), P())
    with pytest.raises(OutSpecError, match=rf"{what}.*since .*{line.split(',')[0]}"):
        fp.compile(fp.data_parallel("data")(lambda w, x: f(W, w)), mesh)(W, X)


def test_a_result_that_is_equal_on_all_ranks_has_no_line() -> None:
    with pytest.raises(OutSpecError) as caught:
        fp.shard_map(lambda x, w: w * 2, MESH, (P("tensor"), P()), P("tensor"))(X, W)
    assert "since" not in str(caught.value)


@pytest.mark.parametrize("state", ["invariant", "reduced"])
def test_a_mean_of_one_value_is_refused_as_a_mean(state: str) -> None:
    def body(w: Tensor) -> Tensor:
        return fp.pmean(w if state == "invariant" else fp.pcast(w, "tensor", to="reduced"), "tensor")

    with pytest.raises(
        TypingError, match=r"pmean over axis 'tensor'.*their mean is that value; drop the pmean"
    ) as caught:
        fp.shard_map(body, MESH, P(), P())(W)
    assert "psum" not in str(caught.value).split("`")[-1]


def test_a_mean_of_one_value_is_refused_under_vmap() -> None:
    with pytest.raises(fp.CollectiveTypeError, match=r"pmean over axis 'i'.*drop the pmean"):
        fp.vmap(lambda x: fp.pmean(torch.ones(2), "i") + x, axis_name="i")(torch.ones(2, 2))


def test_the_gradient_of_a_loss_that_differs_is_of_its_sum() -> None:
    """As the docstrings of fp.grad and fp.grad_and_value say."""

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        of_sum = fp.grad(lambda w: (x @ w).mean())(w)
        return of_sum, fp.grad(lambda w: fp.pmean((x @ w).mean(), "tensor"))(w)

    of_sum, of_mean = fp.shard_map(body, MESH, (P("tensor"), P()), P())(X, W)
    assert torch.equal(of_sum, 2 * of_mean)
    assert all("sum over the ranks" in str(f.__doc__) for f in (fp.grad, fp.grad_and_value))
