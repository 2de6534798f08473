"""The block quantiser: its error bound, its bytes, and values that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.ops import DEQUANTISE, DEQUANTISE_SUM, QUANTISE, block_format, wire_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TEXTS = ["int8/64", "int8/2", "int4/64", "int4/6", "identity"]


def bound(x: torch.Tensor, lengths: list[int], text: str) -> torch.Tensor:
    """Largest error of each element: half of a scale, and the rounding of the dtype."""
    form = block_format(text)
    if form is None:
        return torch.zeros(x.shape, dtype=torch.float64)
    rows = []
    for run in x.double().split(lengths, -1):
        padded = torch.nn.functional.pad(run, (0, -run.shape[-1] % form.block)).unflatten(-1, (-1, form.block))
        scale = padded.abs().amax(-1, keepdim=True) / form.largest
        scale = scale.clamp(min=2.0**-126).expand_as(padded).flatten(-2)
        rows.append(scale[..., : run.shape[-1]])
    scales = torch.cat(rows, -1)
    rounding = 0.0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
    return scales * (0.5 + 2.0**-14) + x.double().abs() * rounding + torch.finfo(x.dtype).smallest_normal * rounding


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    parts=st.integers(1, 3),
    text=st.sampled_from(TEXTS),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-160, 126),
    seed=st.integers(0, 99),
)
def test_the_error_is_at_most_half_of_a_scale(
    lengths: list[int], parts: int, text: str, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """Of any size, down to subnormal numbers, and of runs that blocks do not divide."""
    x = torch.randn(parts, sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (x.clamp(-1.9, 1.9) * 2.0**exponent).to(dtype)
    x = torch.where(torch.isfinite(x), x, torch.finfo(dtype).max)
    sent = QUANTISE(x.reshape(-1), parts, lengths, text)
    assert sent.dtype == torch.uint8 and sent.numel() == parts * wire_bytes(lengths, text, dtype)
    found = DEQUANTISE(sent, parts, lengths, text, dtype).view(parts, -1)
    assert found.dtype == dtype
    assert ((found.double() - x.double()).abs() <= bound(x, lengths, text)).all()
    total = DEQUANTISE_SUM(sent, parts, lengths, text, dtype).double()
    rounding = x.double().abs().sum(0) * torch.finfo(dtype).eps * parts + torch.finfo(dtype).smallest_normal
    is_close = (total - x.double().sum(0)).abs() <= bound(x, lengths, text).sum(0) + rounding
    assert (is_close | ~torch.isfinite(total)).all()  # a sum may leave the range of the dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_identity_keeps_all_bits(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, dtype=torch.float64).to(dtype)
    x[1, 2], x[2, 0] = torch.inf, torch.nan
    sent = QUANTISE(x, 3, [4, 1], "identity")
    found = DEQUANTISE(sent, 3, [4, 1], "identity", dtype)
    assert torch.equal(found.view(torch.uint8), x.reshape(-1).view(torch.uint8))
    x[0].zero_()
    assert not torch.equal(DEQUANTISE(sent, 3, [4, 1], "identity", dtype).view(3, 5)[0], x[0])  # it is a copy


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("text", ["int8/4", "int4/4"])
def test_a_block_with_an_overflow_becomes_nan(value: float, text: str) -> None:
    x = torch.ones(8)
    x[2] = value
    found = DEQUANTISE(QUANTISE(x, 1, [8], text), 1, [8], text, torch.float32)
    assert found[:4].isnan().all()
    assert ((found[4:] - 1).abs() <= 1 / 14 + 1e-6).all()


def test_zeros_stay_zeros_and_the_largest_value_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([0.0, 0.0, largest, -largest])
    found = DEQUANTISE(QUANTISE(x, 1, [4], "int8/2"), 1, [4], "int8/2", torch.float32)
    assert torch.equal(found[:2], torch.zeros(2)) and found.isfinite().all()


@pytest.mark.parametrize("text", ["int8", "int8/0", "int8/3", "int3/64", "", "identity/64"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no format"):
        block_format(text)
