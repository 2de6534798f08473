"""Microbatches that do not divide their batch: whatever sums over samples counts each of them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

from ..program.test_memory import measured
from .networks import SPLIT, batch, integer_loss, loss, parameters

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TARGETS = torch.tensor([0, 2, 1, 0, 2, 2, 1])
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def attended(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    q = (x @ w).reshape(7, 2, 1, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).pow(2).mean()


def normalised(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (F.layer_norm(F.batch_norm(x @ w, None, None, training=True), (8,)) * x).mean()


def convolved(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.conv1d(x.reshape(7, 2, 4), w.reshape(8, 2, 4), padding=2).relu().mean()


def tokens(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The samples' dim merged with another one, as a language model's loss has it."""
    logits = (x.reshape(7, 2, 4) @ w[:4]).reshape(14, 8)
    return F.cross_entropy(logits, y.repeat_interleave(2), ignore_index=1)


LOSSES: dict[str, Loss] = {
    "mean": lambda w, x, y: (x @ w).tanh().mean(),
    "sum": lambda w, x, y: (x @ w).tanh().sum(),
    "a literal number of samples": lambda w, x, y: (x @ w).tanh().sum() / x.shape[0],
    "mean over a mask": lambda w, x, y: ((x @ w).tanh().sum(1) * (y > 0)).sum() / (y > 0).sum(),
    "cross entropy": lambda w, x, y: F.cross_entropy(x @ w, y, ignore_index=1),
    "cross entropy, weighted": lambda w, x, y: F.cross_entropy((x @ w)[:, :3], y, CLASS_WEIGHTS),
    "cross entropy, a sum": lambda w, x, y: F.cross_entropy(x @ w, y, reduction="sum"),
    "cross entropy, per sample": lambda w, x, y: F.cross_entropy(x @ w, y, reduction="none").pow(2).sum(),
    "smoothed": lambda w, x, y: F.cross_entropy(x @ w, y, label_smoothing=0.1),
    "tokens": tokens,
    "attention": attended,
    "norms": normalised,
    "convolution": convolved,
    "variance over samples": lambda w, x, y: (x @ w).var(0).sum() + (x @ w).std(),
    "var_mean": lambda w, x, y: torch.stack([each.sum() for each in torch.var_mean(x @ w, 0)]).sum(),
    "logsumexp over samples": lambda w, x, y: (x @ w).logsumexp(0).sum(),
    "softmax over samples": lambda w, x, y: ((x @ w).softmax(0) * x).sum() + ((x @ w).log_softmax(0) * x).mean(),
    "maximum over samples": lambda w, x, y: (x @ w).amax(0).sum() + (x @ w).min(),
    "norm over samples": lambda w, x, y: torch.linalg.vector_norm(x @ w),
    "all pairs": lambda w, x, y: F.cross_entropy(x @ w @ x.T, torch.arange(7)),
    "a sample picks others": lambda w, x, y: ((x @ w)[y] * x).sum() + (x @ w).index_select(0, y).tanh().sum(),
    "running sum": lambda w, x, y: (x @ w).cumsum(0).tanh().sum(),
    "flipped": lambda w, x, y: ((x @ w).flip(0) * x).tanh().sum(),
    "positions": lambda w, x, y: ((x @ w) * torch.arange(7.0, dtype=x.dtype)[:, None]).tanh().sum(),
    "a Gram matrix": lambda w, x, y: ((x @ w).T @ x).tanh().sum(),
    "a product of samples": lambda w, x, y: (x @ w).tanh().prod(0).sum(),
    "values of the batch's size": lambda w, x, y: (
        ((x @ w + torch.zeros(8).expand(7, 8)) * x.new_ones(7, 1)).tanh().sum()
    ),
    "outer products": lambda w, x, y: torch.einsum("b i, b j -> i j", x @ w, x).tanh().sum(),
    "a product per sample": lambda w, x, y: torch.bmm((x @ w).reshape(7, 4, 2), x.reshape(7, 2, 4)).triu().mean(),
    "cut and joined": lambda w, x, y: torch.cat((x @ w).chunk(2, 1)[::-1], 1).mul(F.pad(x, (1, 0))[:, 1:]).mean(),
    "shifted": lambda w, x, y: ((x @ w)[1:] * x[:-1]).tanh().sum() + (x @ w)[::2].mean(),
    "one of the samples": lambda w, x, y: (x @ w)[3].tanh().sum() + (x @ w)[-1, 0],
    "one-hot": lambda w, x, y: ((x @ w).log_softmax(1) * F.one_hot(y, 8)).sum() / 7,
    "filled": lambda w, x, y: (x @ w).masked_fill((y == 2)[:, None], 0.5).mean(0).tanh().sum(),
    "dims in another order": lambda w, x, y: (x @ w).T.reshape(2, 4, 7).transpose(0, 2).tanh().mean((0, 1)).sum(),
    "samples inside another dim": lambda w, x, y: ((x @ w).T.reshape(-1) * torch.arange(56.0)).tanh().mean(),
    "a loss of torch's": lambda w, x, y: F.mse_loss(x @ w, x) + F.smooth_l1_loss(x @ w, x, reduction="sum"),
    "a loop over samples": lambda w, x, y: sum(row.tanh().mean() for row in (x @ w).unbind()) / 7,
    "sorted": lambda w, x, y: ((x @ w).sort(0).values * x).sum(),
}


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (8, 7))
    return w, x, TARGETS


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.every(4)
def test_every_sample_counts_once(name: str, microbatches: int) -> None:
    """By parameters and by the batch; 7 samples as 4 and 3, as 3, 2, 2, and as 2, 2, 2, 1."""
    f = fp.grad_and_value(fp.accumulate(microbatches)(LOSSES[name]), (0, 1))
    found = fp.compile(f, Mesh())(*arguments())
    wanted = torch.func.grad_and_value(LOSSES[name], (0, 1))(*arguments())
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(
    stage=st.integers(0, 3),
    ranks=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]),
    microbatches=st.integers(2, 6),
    more=st.integers(0, 9),
    reduce=st.sampled_from(["once", "each"]),
)
def test_integer_sums_are_exact(stage: int, ranks: tuple[int, int], microbatches: int, more: int, reduce: str) -> None:
    data, tensor = ranks
    inner = fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(stage, "data"))
    plan = fp.chain(inner, fp.accumulate(microbatches, reduce=reduce))
    inputs = batch(data * (microbatches + more), integers=True)
    mesh = Mesh(data=data, tensor=tensor)
    fp.testing.assert_equivalent(integer_loss, plan, mesh, parameters(2, integers=True), *inputs, exact=True)


def test_a_sum_of_microbatches_is_taken_in_their_order() -> None:
    """Each one's gradient by itself, 4, 4 and 3 samples, added from the first on: the same bits."""
    params, x = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(11, 3, dtype=torch.float64)
    loss = lambda p, x: (x * p["w"]).tanh().sum(0)[0]  # noqa: E731
    found = fp.compile(fp.grad(fp.accumulate(3)(loss)), Mesh())(params, x)["w"]
    first, second, third = (torch.func.grad(loss)(params, part)["w"] for part in x.split([4, 4, 3]))
    torch.testing.assert_close(found, first + second + third, rtol=1e-15, atol=0)


@pytest.mark.filterwarnings("ignore::functional_parallel.errors.RestagingWarning")
def test_a_program_of_another_length_is_another_program() -> None:
    """The last batch of an epoch is traced by itself; the number of samples is part of the program."""
    step = fp.compile(fp.grad_and_value(fp.accumulate(4)(lambda w, x: ((x @ w) ** 2).mean())), Mesh())
    w = torch.randn(3, dtype=torch.float64)
    for samples in (8, 7, 8, 6, 5, 7):
        x = torch.randn(samples, 3, dtype=torch.float64)
        torch.testing.assert_close(step(w, x), torch.func.grad_and_value(lambda w, x: ((x @ w) ** 2).mean())(w, x))


def test_the_peak_is_predicted_to_the_byte() -> None:
    plan = fp.chain(fp.zero(1, "data"), fp.accumulate(3))
    program = fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2)).lower(parameters(2), *batch(22))
    assert program.memory().peak == measured(program)


LIBRARY = torch.library.Library("uneven_tests", "DEF")
LIBRARY.define("squares(Tensor x) -> Tensor")
LIBRARY.impl("squares", lambda x: (x + 1).square().sum(0), "CompositeExplicitAutograd")
torch.library.register_fake("uneven_tests::squares", lambda x: x.new_empty(x.shape[1:]), lib=LIBRARY)
LIBRARY.define("peak(Tensor x) -> Tensor")
LIBRARY.impl("peak", lambda x: x.amax(0), "CompositeExplicitAutograd")
torch.library.register_fake("uneven_tests::peak", lambda x: x.new_empty(x.shape[1:]), lib=LIBRARY)


class Squares(torch.autograd.Function):
    """Not linear: a row of zeros adds one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.uneven_tests.squares(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return cotangent * 2 * (x + 1)


def test_a_users_op_that_is_not_linear_is_given_the_whole_batch() -> None:
    fp.register_rule(torch.ops.uneven_tests.squares, "rows+ c -> c", function=Squares.apply)
    fp.register_rule(torch.ops.uneven_tests.peak, "rows> c -> c")
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    f = lambda w, x: Squares.apply(x @ w).sum()  # noqa: E731
    for samples in (7, 6):
        found = fp.compile(fp.grad_and_value(fp.accumulate(3)(f)), Mesh())(w, x[:samples])
        wanted = torch.func.grad_and_value(lambda w, x: (x @ w + 1).square().sum())(w, x[:samples])
        torch.testing.assert_close(found, wanted)
        step = fp.compile(fp.accumulate(3)(lambda w, x: torch.ops.uneven_tests.peak(x @ w)), Mesh())
        assert torch.equal(step(w, x[:samples]), (x[:samples] @ w).amax(0))
