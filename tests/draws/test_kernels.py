"""Kernels of the draws have the bits of a definition in Python's integers, at any rank's positions."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_parallel import draws
from functional_parallel.collectives import DimSplit
from functional_parallel.draws import definition, kernels, positions

MASK = (1 << 64) - 1
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DIGITS = {torch.float64: 53, torch.float32: 24}
PROBABILITIES = [0.1, 0.25, 1 / 3, 0.5, 1e-9, 1 - 1e-9]


@dataclass(frozen=True)
class Shard:
    """A rank's shard: its shape, that of the full tensor, and the splits that the op is given."""

    local: list[int]
    shape: list[int]
    splits: list[tuple[str, int, int, int]]  # axis, dim, outer, samples
    sizes: dict[str, int]
    ranks: dict[str, int]

    def args(self, dtype: torch.dtype, key: Tensor) -> tuple[Any, ...]:
        flat = [number for _, *split in self.splits for number in split]
        return torch.empty(self.local, dtype=dtype), key, self.shape, [axis for axis, *_ in self.splits], flat

    def positions(self) -> Iterator[int]:
        """The place of each element in the full tensor."""
        for indices in itertools.product(*map(range, self.local)):
            place = 0
            for dim, index in enumerate(indices):
                length = self.local[dim]
                for axis, where, outer, samples in reversed(self.splits):
                    if where == dim:
                        parts = DimSplit(self.sizes[axis], samples)
                        index = parts.whole_position(index, self.ranks[axis], length, outer)
                        length = parts.whole(length)
                place = place * self.shape[dim] + index
            yield place


@st.composite
def shards(draw: st.DrawFn, most: int = 4) -> Shard:
    """The splits of up to two axes per dim, the outer ones first in `outer`, also of dims of several blocks."""
    shape, local, splits = [], [], []
    sizes: dict[str, int] = {}
    for dim in range(draw(st.integers(0, 3))):
        blocks, rest = draw(st.sampled_from([1, 1, 3])), draw(st.integers(0 if dim == 0 else 1, most))
        length, outer = blocks * rest, blocks
        whole = length
        for number in range(draw(st.integers(0, 2))):
            axis = f"{dim}{number}"
            ranks = draw(st.integers(1, 3))
            uneven = number == 0 and blocks == 1 and rest > 1 and ranks > 1 and draw(st.booleans())
            # `rest` rows on each rank, which is one too many on some
            samples = ranks * rest - draw(st.integers(1, ranks - 1)) if uneven else ranks
            sizes[axis] = ranks
            splits.insert(0, (axis, dim, outer, samples))
            whole = DimSplit(ranks, samples).whole(whole)
        shape.append(whole)
        local.append(length)
    return Shard(local, shape, splits, sizes, {axis: draw(st.integers(0, size - 1)) for axis, size in sizes.items()})


def reference(key: int, place: int, digits: int) -> int:
    """SplitMix64, twice, of key and position."""
    x = (place * 0x9E3779B97F4A7C15 + key) & MASK
    for _ in range(2):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        x ^= x >> 31
    return x >> (64 - digits)


def interpreted() -> Any:
    """The Triton kernel, which Triton's interpreter runs on CPU tensors."""
    path = Path(kernels.__file__).parent / "triton_kernel.py"
    spec = importlib.util.spec_from_file_location("functional_parallel.draws.interpreted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def triton_kernel() -> Iterator[Any]:
    pytest.importorskip("triton")
    importlib.import_module("functional_parallel.draws.triton_kernel")  # for the device, before the variable is set
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield interpreted()


def on_a_rank(patch: pytest.MonkeyPatch, shard: Shard) -> None:
    patch.setattr(positions, "axis_size", shard.sizes.__getitem__)
    patch.setattr(positions, "axis_index", lambda axis: torch.tensor(shard.ranks[axis]))


def check(shard: Shard, dtype: torch.dtype, keys: list[int], p: float, draw: Any) -> None:
    key, places = torch.tensor(keys), list(shard.positions())
    args = shard.args(dtype, key if len(keys) > 1 else key[0])
    shape = [*args[1].shape, *shard.local]
    digits = DIGITS.get(dtype, 8)
    numbers = [reference(each, place, digits) * 2.0**-digits for each in keys for place in places]
    wanted = torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(shape)
    where = draws.places(*args)
    found = draw(*where, dtype, None)
    assert found.dtype == dtype and found.is_contiguous() and torch.equal(found, wanted)
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    digits = DIGITS[wide]
    numbers = [reference(each, place, digits) * 2.0**-digits for each in keys for place in places]
    drawn = torch.tensor(numbers, dtype=torch.float64).to(wide).reshape(shape)
    found = draw(*where, dtype, p)
    assert found.dtype == torch.bool and found.is_contiguous() and torch.equal(found, ~(drawn < p))


KEYS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=3)


@settings(max_examples=60)
@given(
    shard=shards(),
    dtype=st.sampled_from(DTYPES),
    keys=KEYS,
    p=st.sampled_from(PROBABILITIES),
    block=st.sampled_from([1, 3, 8, 1 << 16]),
)
def test_the_blocks_of_the_cpu_and_the_definition(
    shard: Shard, dtype: torch.dtype, keys: list[int], p: float, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_a_rank(patch, shard)
        patch.setattr(kernels, "_BLOCK", block)
        check(shard, dtype, keys, p, draws.drawn)
        check(shard, dtype, keys, p, lambda *args: draws.defined(*args).contiguous())


@settings(max_examples=25, deadline=None)
@given(shard=shards(), dtype=st.sampled_from(DTYPES), keys=KEYS, p=st.sampled_from(PROBABILITIES), wide=st.booleans())
def test_the_kernel_of_cuda(
    shard: Shard, dtype: torch.dtype, keys: list[int], p: float, wide: bool, triton_kernel: Any
) -> None:
    def draw(
        seeds: Tensor, size: list[int], sizes: Any, strides: Any, tables: Any, dtype: torch.dtype, p: Any
    ) -> Tensor:
        out = torch.empty([*seeds.shape, *size], dtype=dtype if p is None else torch.bool)
        if out.numel():
            place = positions.Positions(sizes, strides, tables)
            triton_kernel.draw_(out, seeds, place, *definition.digits_of(dtype, p))
        return out

    with pytest.MonkeyPatch.context() as patch:
        on_a_rank(patch, shard)
        patch.setattr(triton_kernel, "_BLOCK", 16)
        check(shard, dtype, keys, p, draw)


def test_a_tensor_of_one_run_needs_no_division() -> None:
    """An unsplit tensor, and one that is split on dim 0, are consecutive positions: one digit."""
    for splits in ((), (0, 1, 4)):
        like = torch.empty(4, 5, 6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(positions, "axis_size", lambda axis: 4)
            patch.setattr(positions, "axis_index", lambda axis: 3)
            whole = [16, 5, 6] if splits else [4, 5, 6]
            first, digits = positions.positions(like, whole, ["data"] if splits else [], list(splits))
        assert (first, digits) == (3 * 4 * 30 if splits else 0, positions.Positions([120], [1], []))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_compiles_the_kernel_for_cuda(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To machine code for an H100, which needs no GPU."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from functional_parallel.draws.triton_kernel import _draw

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    names = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    layout = (0, 64, -1, 8, 0, 0, 4, 1, -1)
    for out, least, wide in ((names[dtype], -1, True), ("*u8", 12345, False)):
        constants = {"LAYOUT": layout, "DIGITS": DIGITS.get(dtype, 8), "LEAST": least, "WIDE": wide, "BLOCK": 1024}
        types = {"out": out, "seeds": "*i64", "tables": "*i64", "each": "i64", "blocks": "i32"}
        signature = types | dict.fromkeys(constants, "constexpr")
        compiled = compile(ASTSource(_draw, signature, constants), target=GPUTarget("cuda", 90, 32))
        assert "cubin" in compiled.asm
