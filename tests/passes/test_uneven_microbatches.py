"""Microbatches that do not divide their batch: whatever sums over samples counts each of them once."""

from __future__ import annotations

from collections.abc import Callable

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

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
    "sorted": lambda w, x, y: ((x @ w).sort(0).values * x).sum(),
}


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (8, 7))
    return w, x, TARGETS


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_every_sample_counts_once(name: str, microbatches: int) -> None:
    """By parameters and by the batch; 7 samples as 4 and 3, as 3, 2, 2, and as 2, 2, 2, 1."""
    f = fp.grad_and_value(fp.accumulate(microbatches)(LOSSES[name]), (0, 1))
    found = fp.compile(f, Mesh())(*arguments())
    wanted = torch.func.grad_and_value(LOSSES[name], (0, 1))(*arguments())
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
