"""What a loss computes under torch.inference_mode(), as a teacher's output, is sharded as under torch.no_grad()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import functional_parallel as fp
from sharding_specs import Mesh, P

X = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
HEADS = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

TEACHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: functional.linear(x, w, w[0]),
    "einsum": lambda x, w: torch.einsum("bcij,jk->bcik", x, w),
    "matmul": lambda x, w: x @ w + w.chunk(2)[0].repeat(2, 1),
    "convolution": lambda x, w: functional.conv2d(x, w[:2, :2, None, None], w[0, :2], padding="same"),
    "layer norm": lambda x, w: functional.layer_norm(x, (8,), w[0], w[1]),
    "group norm": lambda x, w: functional.group_norm(x, 2),
    "rms norm": lambda x, w: functional.rms_norm(x, (8,)),
    "batch norm": lambda x, w: functional.batch_norm(x, None, None, training=True),
    "cross entropy": lambda x, w: functional.cross_entropy(x.flatten(0, 2), x.argmax(-1).flatten()),
    "cross entropy of images": lambda x, w: functional.cross_entropy(x, x.argmax(1), label_smoothing=0.1),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x, x @ w, x, is_causal=True),
    "heads": lambda x, w: functional.multi_head_attention_forward(
        *[x[:, 0]] * 3,
        8,
        2,
        HEADS.in_proj_weight.detach(),
        HEADS.in_proj_bias.detach(),
        None,
        None,
        False,
        0.0,
        w,
        w[0],
    )[0],
    "embedding": lambda x, w: functional.embedding(x.argmax(-1), w),
    "pooling": lambda x, w: functional.adaptive_avg_pool2d(functional.max_pool2d(x, 2), 2),
    "in place": lambda x, w: functional.dropout(x.clone().mul_(2).add_(w), training=False).relu_().reshape(-1, 8),
    "interpolation": lambda x, w: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "statistics": lambda x, w: x.std(-1) + torch.linalg.norm(x, dim=-1) + x.softmax(-1).amax(-1),
    "nested": lambda x, w: _nested(x, w),
}


def _nested(x: Tensor, w: Tensor) -> Tensor:
    """The inner mode switches gradients on again, as in torch."""
    with torch.no_grad():
        h = functional.linear(x, w)
    with torch.inference_mode(False):
        return functional.linear(h, w)


def loss_under(mode: Callable[[], Any], teacher: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(p: Any, x: Tensor) -> Tensor:
        with mode():
            target = teacher(x, p["t"])
        return ((x @ p["w"]).mean() - target.clone()).square().mean()

    return loss


PLANS = {
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "tensor": (fp.tensor_parallel("tensor", {"*": P(None, "tensor")}), Mesh(tensor=2)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.every(2)
def test_inference_mode_gives_the_program_of_no_grad(name: str, plan: str) -> None:
    transform, mesh = PLANS[plan]
    params, texts, values = {"w": W, "t": W.T.contiguous()}, [], []
    for mode in (torch.no_grad, torch.inference_mode):
        step = fp.compile(fp.grad_and_value(transform(loss_under(mode, TEACHERS[name]))), mesh)
        values.append(step(params, X))
        texts.append(step.program.lines())
    assert texts[0] == texts[1]
    assert torch.equal(values[0][1], values[1][1]) and torch.equal(values[0][0]["w"], values[1][0]["w"])
    assert name == "nested" or not values[1][0]["t"].any()
