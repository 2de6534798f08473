"""A loss that takes derivatives of layers itself: penalties on critics, steps within steps. Every op has a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..some_cases import one_in

Loss = Callable[[Any, Tensor, Tensor], Tensor]

IMAGES: dict[str, Callable[[], list[nn.Module]]] = {  # (8, 2, 6, 6) → features
    "strided": lambda: [nn.Conv2d(2, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3, 1, 1, bias=False)],
    "grouped": lambda: [nn.Conv2d(2, 4, 3, 1, 1, groups=2), nn.Softplus(), nn.Conv2d(4, 2, 1)],
    "transposed": lambda: [nn.ConvTranspose2d(2, 4, 3, 2, 1), nn.ELU(), nn.Conv2d(4, 4, 3, 2, 1)],
    "group norm": lambda: [nn.Conv2d(2, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.Mish()],
    "instance norm": lambda: [nn.Conv2d(2, 4, 3, 1, 1), nn.InstanceNorm2d(4, affine=True), nn.Hardswish()],
    "batch norm": lambda: [nn.Conv2d(2, 4, 3, 1, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.SiLU()],
    "pooled": lambda: [nn.Conv2d(2, 4, 3, 1, 1), nn.AvgPool2d(2), nn.Tanh(), nn.MaxPool2d(2)],
    "adaptively pooled": lambda: [nn.Conv2d(2, 4, 3, 1, 1), nn.AdaptiveAvgPool2d(2), nn.LogSigmoid()],
    "enlarged": lambda: [nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, 2, 1, padding_mode="reflect"), nn.PReLU()],
    "smoothly enlarged": lambda: [nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 2, 3, 2), nn.GELU()],
    "layer norm": lambda: [
        nn.Flatten(),
        nn.LayerNorm(72),
        nn.Linear(72, 8),
        nn.LayerNorm(8, bias=False),
        nn.Hardtanh(),
    ],
    "softmax": lambda: [nn.Flatten(), nn.Linear(72, 8), nn.Softmax(1), nn.Linear(8, 8), nn.LogSoftmax(1)],
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda y, labels: F.cross_entropy(y, labels, ignore_index=2, label_smoothing=0.1),
    "weighted cross entropy": lambda y, labels: F.cross_entropy(y, labels, weight=torch.arange(1.0, 5).double()),
    "of pixels": lambda y, labels: F.cross_entropy(
        y.reshape(-1, 2, 2), labels.reshape(-1, 1) // 2 % torch.tensor([2, 1])
    ),
    "squares": lambda y, labels: F.mse_loss(y, F.one_hot(labels, 4).double()),
    "summed squares": lambda y, labels: F.mse_loss(y, F.one_hot(labels, 4).double(), reduction="sum"),
    "huber": lambda y, labels: F.huber_loss(y, F.one_hot(labels, 4).double(), delta=0.7),
    "smooth": lambda y, labels: F.smooth_l1_loss(y, F.one_hot(labels, 4).double()),
    "binary": lambda y, labels: F.binary_cross_entropy(y.sigmoid(), F.one_hot(labels, 4).double()),
    "margin": lambda y, labels: F.soft_margin_loss(y, F.one_hot(labels, 4).double() * 2 - 1),
    "gated": lambda y, labels: F.glu(y * labels.unsqueeze(1)).square().mean(),
    "every other": lambda y, labels: (y[:, ::2] * y[:, 1:2] * y[:, 3].unsqueeze(1)).mean(),
}

PLANS: dict[str, Callable[[Any], tuple[Any, Mesh]]] = {
    "data": lambda split: (fp.data_parallel("data", strict=True), Mesh(data=2)),
    "microbatches": lambda split: (fp.chain(fp.zero(3, "data", strict=True), fp.accumulate(2)), Mesh(data=2)),
    "tensor": lambda split: (
        fp.chain(fp.tensor_parallel("tensor", split, strict=True), fp.zero(1, "data", strict=True)),
        Mesh(data=2, tensor=2),
    ),
}


def penalised(f: Callable[[Any, Tensor], Tensor]) -> Loss:
    """The penalty of Gulrajani et al., arXiv 1704.00028."""

    def loss(params: Any, x: Tensor, _: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: f(params, x).square().sum())(x)
        return f(params, x).mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return loss


def inner_step(loss: Loss) -> Loss:
    def after(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        slopes = torch.func.grad(loss)(params, x, labels)
        return loss({name: p - 0.1 * slopes[name] for name, p in params.items()}, x, labels)

    return after


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def labels() -> Tensor:
    return torch.arange(8) % 4


@one_in(3, name=IMAGES, plan=PLANS)
def test_slopes_of_layers(name: str, plan: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*IMAGES[name]()).double()
    f, params = fp.functional(net)
    split = {path: P("tensor") for path, p in params.items() if p.ndim > 1 and p.shape[0] % 2 == 0}
    transform, mesh = PLANS[plan](split if plan == "tensor" else None)
    x = drawn(8, 2, 6, 6)
    fp.testing.assert_equivalent(penalised(f), transform, mesh, dict(params), x, labels(), rtol=1e-10)


@one_in(3, name=LOSSES, plan=PLANS)
def test_a_step_within_a_step(name: str, plan: str) -> None:
    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[name](torch.tanh(x @ params["first"]) @ params["second"], labels)

    params = {"first": drawn(6, 8), "second": drawn(8, 4, seed=1)}
    transform, mesh = PLANS[plan]({"first": P(None, "tensor"), "second": P(None, "tensor")})
    fp.testing.assert_equivalent(inner_step(loss), transform, mesh, params, drawn(8, 6), labels(), rtol=1e-10)


@pytest.mark.parametrize("plan", PLANS)
def test_attention_and_tables(plan: str) -> None:
    """torch has no second derivative of its kernels for attention; the definition has."""

    def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        return (q @ k.mT / math.sqrt(2)).masked_fill(~seen, -math.inf).softmax(-1) @ v

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def of(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
        def loss(params: Any, tokens: Tensor, _: Tensor) -> Tensor:
            x = F.embedding(tokens, params["table"], padding_idx=1)
            q, k, v = (params["qkv"] @ x.mT).reshape(8, 3, 2, 2, 5).mT.unbind(1)
            x = x + attend(q, k, v).transpose(1, 2).flatten(2)
            return F.cross_entropy((x @ params["head"]).flatten(0, 1), tokens.roll(1, 1).flatten())

        return inner_step(loss)

    params = {"table": drawn(6, 4), "qkv": drawn(12, 4, seed=1), "head": drawn(4, 6, seed=2)}
    transform, mesh = PLANS[plan]({"table": P("tensor"), "head": P(None, "tensor")})
    tokens = torch.arange(40).reshape(8, 5) * 7 % 6
    step = fp.compile(fp.grad_and_value(transform(of(kernel))), mesh)
    found, value = step(params, tokens, labels())
    wanted, whole = torch.func.grad_and_value(of(defined))(params, tokens, labels())
    torch.testing.assert_close((value, found), (whole, wanted), rtol=1e-10, atol=1e-12)


def test_large_values_have_slopes_of_slopes() -> None:
    """Of a softplus written by an exponential they would be infinite over infinite."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: F.softplus(x * w).sum())(x).square().sum()

    w, x = torch.tensor(1.0), torch.tensor([-1000.0, 1000.0])
    slope = fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=2))(w, x)
    assert slope == torch.func.grad(loss)(w, x) == 2
