"""Attention on a CUDA device: the chosen kernel against float64 on the CPU, and against the choice of torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ops.attention_kernels import Shape, attention_kernel
from sharding_specs import Mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

HEADS, TIMES = (8, 12, 16, 32, 64, 80, 96, 128), (1, 7, 16, 64, 100, 128, 192, 256)
# largest error, as a multiple of eps of the dtype and of the largest value, at least 1
BOUND = 8.0


def drawn(head: int, time: int, keys: int, groups: int, transposed: bool) -> list[Tensor]:
    """Queries, keys, values and a cotangent in float64; (batch, time, heads, size) if they are transposed."""
    generator = torch.Generator("cpu").manual_seed(head * 1000 + time)
    sizes = ((4, time), (groups, keys), (groups, keys), (4, time))
    found = [torch.randn(2, *size, head, generator=generator, dtype=torch.float64, device="cpu") for size in sizes]
    return [x.transpose(1, 2).contiguous() if transposed else x for x in found]


def results(drawn: list[Tensor], mask: Tensor | None, is_causal: bool, ours: bool, transposed: bool) -> list[Tensor]:
    """Return the output and the gradients, by a program or by torch's autograd."""
    *qkv, up = drawn
    masks = [] if mask is None else [mask]

    def loss(qkv: list[Tensor], up: Tensor, *masks: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv) if transposed else qkv
        mask = masks[0] if masks else None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2) if transposed else out
        return (out * up).sum(dtype=torch.float32), out

    if ours:
        step = fp.compile(fp.grad_and_value(fp.remat("nothing")(loss), has_aux=True), Mesh())
        grads, (_, out) = step(qkv, up, *masks)
    else:
        grads, (_, out) = torch.func.grad_and_value(loss, has_aux=True)(qkv, up, *masks)
    return [out, *grads]


def errors(found: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> list[float]:
    assert all(bool(x.isfinite().all()) for x in found)
    pairs = zip(found, want, strict=True)
    eps = torch.finfo(dtype).eps
    return [float((x.double().cpu() - y).abs().max() / y.abs().max().clamp(min=1.0) / eps) for x, y in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["full", "causal", "mask", "bias", "grouped", "more keys"])
def test_values_and_gradients(kind: str, head: int, dtype: torch.dtype) -> None:
    is_causal = kind in ("causal", "grouped")
    for time in TIMES:
        keys, groups, transposed = time + 5 * (kind == "more keys"), 2 if kind == "grouped" else 4, time % 3 != 0
        given = [x.to(dtype) for x in drawn(head, time, keys, groups, transposed)]
        mask = None
        if kind == "mask":
            mask = torch.ones(time, keys, dtype=torch.bool, device="cpu").tril()
        elif kind == "bias":
            mask = torch.linspace(-2, 2, time * keys, device="cpu").reshape(time, keys).to(dtype)
        wide = mask.double() if kind == "bias" and mask is not None else mask
        want = results([x.double() for x in given], wide, is_causal, False, transposed)
        on_device = [x.to("cuda") for x in given], None if mask is None else mask.to("cuda")
        mine = errors(results(*on_device, is_causal, True, transposed), want, dtype)
        assert max(mine) <= BOUND, f"time {time}: {mine} eps"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_the_choice_of_torch(dtype: torch.dtype) -> None:
    """Where torch's kernel is right, ours has no larger errors. Where torch's is not finite, that is printed."""
    for head, time in product(HEADS, (16, 128, 256, 1024)):
        given = [x.to(dtype) for x in drawn(head, time, time, 4, True)]
        want = results([x.double() for x in given], None, True, False, True)
        on_device = [x.to("cuda") for x in given]
        mine = errors(results(on_device, None, True, True, True), want, dtype)
        theirs = results(on_device, None, True, False, True)
        kernel = attention_kernel(Shape(dtype, head, head, time, time, has_mask=False, is_causal=True))
        if all(bool(x.isfinite().all()) for x in theirs):
            bound = max(BOUND, 2 * max(errors(theirs, want, dtype)))
            assert max(mine) <= bound, f"{kernel}: heads of {head}, time {time}"
        else:
            print(f"torch's choice is not finite: {dtype}, heads of {head}, time {time}; ours: {kernel.name}")


def test_rows_that_begin_anywhere() -> None:
    """Queries, keys and values that are parts of one tensor, at offsets that are no multiples of 16 bytes."""

    def loss(whole: Tensor) -> Any:
        q, k, v = (whole[..., 1 + 8 * index :][..., :8] for index in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.float().square().sum(), out

    whole = torch.randn(2, 4, 16, 27, device="cuda", dtype=torch.bfloat16)
    grads, (_, out) = fp.compile(fp.grad_and_value(fp.remat("nothing")(loss), has_aux=True), Mesh())(whole)
    want, (_, of_torch) = torch.func.grad_and_value(loss, has_aux=True)(whole.double().cpu())
    assert max(errors([out, grads], [of_torch, want], torch.bfloat16)) <= 2 * BOUND


def test_the_lowered_program_is_that_of_the_device() -> None:
    """Lowered from tensors without values, a program has the same ops."""

    def loss(qkv: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True).float().sum()

    step = fp.compile(fp.grad(fp.remat("nothing")(loss)), Mesh())
    real = [torch.zeros(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    assert step.lower(real).lines() == step.lower(fp.abstract(real, "cuda")).lines()
