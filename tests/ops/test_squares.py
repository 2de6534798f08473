"""The sum of squares of many tensors: exact on integers, in the dtype that plain ops would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.ops.squares import _BLOCK, sum_of_squares
from functional_parallel.testing.tracker import tracked


@settings(max_examples=20)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, _BLOCK - 1, _BLOCK, 2 * _BLOCK + 5]), min_size=1, max_size=4),
    turned=st.booleans(),
)
def test_it_is_exact_on_integers(sizes: list[int], turned: bool) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randint(-9, 10, (size, 2), generator=generator).double() for size in sizes]
    tensors = [x.t() for x in tensors] if turned else tensors
    assert sum_of_squares(tensors) == sum((x * x).sum() for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_near_the_truth(dtype: torch.dtype) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = sum_of_squares([x, x.float()])
    assert found.dtype == torch.float32
    wanted = 2 * x.double().square().sum()
    assert abs(found.double() - wanted) <= 8 * torch.finfo(dtype).eps * wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 2 * _BLOCK + 5])
def test_squares_of_narrow_numbers_are_wide(dtype: torch.dtype, size: int) -> None:
    """float16 ends at 65504, so a norm of 256 was infinite, and clipping to it left nothing of the gradients."""
    x = torch.full((size,), 256.0, dtype=dtype)
    for tensors in ([x], [x[1:], x[:1]]):
        found = sum_of_squares(tensors)
        assert found.dtype == torch.float32
        assert found == size * 256.0**2
    assert torch.func.vmap(lambda x: sum_of_squares([x]))(x[None]) == size * 256.0**2


def test_a_part_of_a_buffer_gives_the_bits_of_a_tensor_of_its_own() -> None:
    x = torch.randn(3 * _BLOCK + 1, generator=torch.Generator().manual_seed(0))
    for offset in (1, 3, 17):
        assert torch.equal(sum_of_squares([x[offset:]]), sum_of_squares([x[offset:].clone()]))


def test_it_makes_nothing_that_a_program_would_have_to_hold() -> None:
    x = torch.ones(8 * _BLOCK)
    with tracked(x) as tracker:
        result = sum_of_squares([x])
    assert tracker.peak == 4 * x.numel() + result.nbytes
