"""Ops on operands that torch treats specially: open slices under vmap, empty dims, strides that kernels refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import functional_parallel as fp
from sharding_specs import Mesh, P

MESH = Mesh(i=2)


def numbers(*shape: int) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)


# -----------------------------------------------------------------------------
# Writes through slices under vmap
# -----------------------------------------------------------------------------


def _set(b: Tensor) -> None:
    b[1:] = 5.0


def _increase(b: Tensor) -> None:
    b[..., 1:] += 3


def _mask(b: Tensor) -> None:
    b[1:].masked_fill_(b[1:] > 20, 0.0)


def _put(b: Tensor) -> None:
    b[..., 1:].index_put_((torch.tensor([0]),), torch.tensor(9.0, dtype=b.dtype))


def _shift(b: Tensor) -> None:
    b[:-1] = b[1:].clone()


def _skip(b: Tensor) -> None:
    b[..., ::2].copy_(b[..., ::2] * 2)


def _cumulate(b: Tensor) -> None:
    b[..., 1:].cumsum_(-1)


def _scatter(b: Tensor) -> None:
    b[1:].scatter_(0, torch.zeros_like(b[1:2], dtype=torch.int64), 5.0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("write", [_set, _increase, _mask, _put, _shift, _skip, _cumulate, _scatter])
@pytest.mark.parametrize("spec", [P(), P(None, "i")], ids=repr)
@pytest.mark.every(2)
def test_writes_through_slices_under_vmap(write: Callable[[Tensor], None], spec: P) -> None:
    def f(x: Tensor) -> Tensor:
        b = x * 1
        write(b)
        return b

    x, loss = numbers(3, 2, 6), lambda x: (f(x) ** 2).sum()
    assert torch.equal(fp.compile(fp.vmap(fp.partition(f, "i", (spec,), P())), MESH)(x), torch.func.vmap(f)(x))
    found = fp.compile(fp.vmap(fp.grad(fp.partition(loss, "i", (spec,), P()))), MESH)(x)
    assert torch.equal(found, torch.func.vmap(torch.func.grad(loss))(x))


# -----------------------------------------------------------------------------
# Empty tensors along a sharded dim
# -----------------------------------------------------------------------------

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x[:0], x, x[:0]]),
    "cat of new": lambda x: torch.cat([x.new_zeros(0, 6), x]),
    "cat of empty ones": lambda x: torch.cat([x[:0], x[:0]]),
    "cat of twice": lambda x: torch.cat([x, x[:0], x * 2]),
    "tensor_split": lambda x: torch.cat(torch.tensor_split(x, [0, 0, 4, 4])),
    "split": lambda x: torch.cat(x.split([0, 2, 0, 2])),
    "chunk": lambda x: x[:0].chunk(2)[0],
    "narrow": lambda x: x.narrow(0, 2, 0),
    "stack": lambda x: torch.stack([x[:0], x[:0]]),
    "hstack": lambda x: torch.hstack([x, x[:, :0]]),
    "sum": lambda x: x[:0].sum(0) + x,
    "reshape": lambda x: x[:0].reshape(6, 0),
}

OF_EMPTY: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x, x]),
    "cat with filled": lambda x: torch.cat([x, x.new_ones(4, 6)]),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split([0, 0])[0],
    "chunk": lambda x: x.chunk(2)[0],
    "narrow": lambda x: x.narrow(0, 0, 0),
    "slice": lambda x: x[1:3],
    "every other": lambda x: x[::2],
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "product": lambda x: x.t() @ x,
}


@pytest.mark.parametrize("name", sorted(TAKEN))
@pytest.mark.parametrize("spec", [P("i"), P(None, "i")], ids=repr)
@pytest.mark.every(2)
def test_empty_slices(name: str, spec: P) -> None:
    require_equal(TAKEN[name], numbers(4, 6), spec)


@pytest.mark.parametrize("name", sorted(OF_EMPTY))
def test_empty_shards(name: str) -> None:
    require_equal(OF_EMPTY[name], numbers(0, 6), P("i"))


def require_equal(f: Callable[[Tensor], Tensor], x: Tensor, spec: P) -> None:
    found = fp.compile(fp.partition(f, "i", (spec,), P()), MESH)(x)
    assert found.shape == f(x).shape and torch.equal(found, f(x))
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    found = fp.compile(fp.grad(fp.partition(loss, "i", (spec,), P())), MESH)(x)
    assert torch.equal(found, torch.func.grad(loss)(x))


# -----------------------------------------------------------------------------
# Scans and selections of gathered parameters, the batch not split
# -----------------------------------------------------------------------------

OF_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "logcumsumexp, twice": lambda x: x.logcumsumexp(0) * x.logcumsumexp(1),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(0)[0],
    "logsumexp": lambda x: x.logsumexp(0),
    "index_select": lambda x: x.sum().index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("batch", [P(), P("i")], ids=repr)
@pytest.mark.parametrize("name", sorted(OF_PARAMETERS))
@pytest.mark.every(3)
def test_scans_of_parameters(name: str, batch: P, stage: int) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return ((OF_PARAMETERS[name](w) * x.sum()) ** 2).sum() + (OF_PARAMETERS[name](w * x[0]) * 3).sum()

    w, x = numbers(4, 6).sin(), numbers(4, 6) / 24
    fp.testing.assert_equivalent(loss, fp.zero(stage, "i", batch=batch), MESH, w, x)


# -----------------------------------------------------------------------------
# Kernels that refuse strides
# -----------------------------------------------------------------------------

LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_norm": lambda h, w: functional.group_norm(h, 2),
    "group_norm, affine": lambda h, w: functional.group_norm(h, 2, w, w),
    "group_norm of a masked sum": lambda h, w: functional.group_norm((h[:, None] * (h > 0.3)[:, :, None]).sum(1), 2),
    "layer_norm": lambda h, w: functional.layer_norm(h, (4,)),
    "instance_norm": lambda h, w: functional.instance_norm(h),
    "batch_norm": lambda h, w: functional.batch_norm(h, None, None, training=True),
    "conv1d": lambda h, w: functional.conv1d(h, w[:2, None, None].expand(2, 4, 1)),
    "max_pool1d": lambda h, w: functional.max_pool1d(h, 2),
    "interpolate": lambda h, w: functional.interpolate(h, scale_factor=2.0, mode="linear"),
    "pixel_shuffle": lambda h, w: functional.pixel_shuffle(h[..., None].expand(4, 4, 4, 2), 2),
    "bits": lambda h, w: h + h.view(torch.int64).clamp(0, 1),
}


@pytest.mark.parametrize("plan", [fp.data_parallel("i"), fp.tensor_parallel("i", P("i"))], ids=repr)
@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.every(2)
def test_layers_of_an_argument_that_is_not_contiguous(name: str, plan: Callable[..., Any]) -> None:
    x = (numbers(4, 4, 4).sin() * 2).transpose(1, 2)
    loss = lambda w, x: (LAYERS[name](x, w) * w.sum() + LAYERS[name](x * w, w)).pow(2).sum()  # noqa: E731
    fp.testing.assert_equivalent(loss, plan, MESH, numbers(4) / 4, x)


def test_one_tensor_as_gradient_and_operand() -> None:
    """`log_sigmoid_backward(x, x, buffer)`, as a gradient of `x * logsigmoid(x)` may have it."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        scaled = x * w
        _, buffer = torch.ops.aten.log_sigmoid_forward(scaled)
        return torch.ops.aten.log_sigmoid_backward(scaled, scaled, buffer).sum()

    w, x = torch.ones(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    found = fp.compile(fp.data_parallel("data")(f), Mesh(data=2))(w, x)
    torch.testing.assert_close(found, f(w, x))
