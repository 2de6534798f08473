"""Any box of an assembled tensor, read as boxes of the files, has the values of the functions on full tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.interop.hugging_face.assembled import Assembled
from sharding_specs import Box

Tensors = list[Any]
SHAPE = (4, 6, 2)

VIEWS: list[Callable[[Any, int], Any]] = [
    lambda x, n: x.transpose(n % x.ndim, (n // 3) % x.ndim).contiguous(),
    lambda x, n: x.chunk(2, n % x.ndim)[-1],
    lambda x, n: torch.split(x, [1, x.shape[n % x.ndim] - 1], n % x.ndim)[x.shape[n % x.ndim] > 1],
    lambda x, n: x.unsqueeze(n % (x.ndim + 1)),
    lambda x, n: x.narrow(n % x.ndim, x.shape[n % x.ndim] - 1, 1).squeeze(n % x.ndim) if x.ndim > 1 else x,
    lambda x, n: x[n % x.shape[0]] if x.ndim > 1 else x,
    lambda x, n: x[..., n % x.shape[-1] :],
    lambda x, n: x.permute(*reversed(range(x.ndim))),
    lambda x, n: x.unbind(n % x.ndim)[0] if x.ndim > 1 else x,
]
JOINS: list[Callable[[Any, int], Any]] = [
    lambda x, n: torch.cat([x, x], dim=n % x.ndim),
    lambda x, n: torch.stack([x, x], n % (x.ndim + 1)),
    lambda x, n: torch.concat((x, x[:1]), 0),
]
COMPUTED: list[Callable[[Any, int], Any]] = [
    lambda x, n: x.reshape(-1),
    lambda x, n: x[..., ::2],
    lambda x, n: x * 2,
    lambda x, n: x.to(torch.int64).to(torch.float32),
]


def files(count: int) -> dict[str, torch.Tensor]:
    return {f"k{i}": torch.arange(48.0).reshape(SHAPE) + 100 * i for i in range(count)}


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_box_of_any_functions(data: st.DataObject) -> None:
    held = files(2)
    symbols = [Assembled.of_key(key, x.shape, x.dtype) for key, x in held.items()]
    wanted: Tensors = list(held.values())
    known = True
    for _ in range(data.draw(st.integers(0, 4))):
        kinds = data.draw(st.sampled_from([VIEWS, VIEWS, JOINS, COMPUTED]))
        function, number = data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, 11))
        symbols, wanted = ([function(x, number) for x in each] for each in (symbols, wanted))
        known = known and kinds is not COMPUTED
    if wanted[0].ndim:
        symbols, wanted = [torch.cat(symbols, 0)], [torch.cat(wanted, 0)]
    full = wanted[0]
    assert (symbols[0].shape, symbols[0].dtype) == (full.shape, full.dtype)
    if known:
        assert not symbols[0].needs_all or not full.numel()
    start = tuple(data.draw(st.integers(0, size - 1)) for size in full.shape) if full.numel() else ()
    box = Box(start, tuple(data.draw(st.integers(1, n - s)) for n, s in zip(full.shape, start, strict=False)))
    if not full.numel():
        return
    read = 0

    def source(key: str, part: Box, target: torch.Tensor) -> None:
        nonlocal read
        read += part.numel
        assert part.size == target.shape
        target.copy_(held[key][part.slices])

    found = torch.empty(box.size, dtype=full.dtype)
    symbols[0].read(box, found, source)
    assert torch.equal(found, full[box.slices])
    if known:
        assert read == box.numel


def test_a_write_is_refused_by_name() -> None:
    x = Assembled.of_key("k", SHAPE, torch.float32)
    with pytest.raises(TypeError, match="__setitem__ writes into a tensor"):
        x[0] = 1
    with pytest.raises(TypeError, match="mul_ writes"):
        x.mul_(2)


def test_another_function_knows_its_keys() -> None:
    a, b = (Assembled.of_key(key, SHAPE, torch.float32) for key in "ab")
    assert (a + b).keys == {"a", "b"} and (a + b).needs_all and not torch.cat([a, b]).needs_all
