"""The sum of squares of many tensors: exact on integers, in the dtype that plain ops would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.ops import squares
from functional_parallel.ops.squares import _BLOCK, sum_of_squares
from functional_parallel.testing.tracker import tracked
from tests.private_torch.count import Count

aten = torch.ops.aten


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


@st.composite
def tensors_of_a_device(draw: st.DrawFn) -> list[torch.Tensor]:
    """Integers of several dtypes, among them tensors that are empty, or complex, or not contiguous."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        x = torch.randint(-9, 10, shape, generator=generator)
        dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]))
        x = (x + 2j * x).to(dtype) if dtype.is_complex else x.to(dtype)
        found.append(draw(st.sampled_from([x, x.mT if x.ndim > 1 else x, x[..., ::2] if x.ndim else x])))
    return found


@settings(max_examples=50)
@given(tensors=tensors_of_a_device())
def test_the_form_of_other_devices_is_that_of_the_cpu(tensors: list[torch.Tensor]) -> None:
    wanted = sum_of_squares(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squares, "in_main_memory", lambda x: False)
        found = sum_of_squares(tensors)
    assert found.dtype == wanted.dtype and found.shape == ()
    torch.testing.assert_close(found, wanted, rtol=8 * torch.finfo(torch.float32).eps, atol=0)


def test_other_devices_read_many_large_tensors_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "in_main_memory", lambda x: False)
    tensors = [torch.full((size,), 256.0, dtype=torch.float16) for size in (3, 5 * _BLOCK, 7)]
    with Count() as mode:
        found = squares._sum(tensors)
    assert found == (5 * _BLOCK + 10) * 256.0**2
    assert mode.seen == [
        aten._foreach_norm.Scalar,
        *(aten.stack.default, aten.pow.Tensor_Scalar, aten.sum.default),
    ]
