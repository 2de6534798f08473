"""Ops around a collective that sends in another format: values to bytes, and bytes to values or to their sum.

A value is flat and consists of `parts` equal rows, one per rank. A row consists of runs of the given lengths, one for
each tensor of a bucket. No block of the quantiser has elements of two runs, so buckets do not change the bits. The
bytes of a row are the scales of all its blocks, then the integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..ir import define_op
from .block_quantiser import BlockFormat, block_format, cut_runs, packed_integers, padded_runs, unpacked_integers


def wire_bytes(lengths: Sequence[int], text: str, dtype: torch.dtype) -> int:
    """Bytes of one row in a format."""
    form = block_format(text)
    return sum(lengths) * dtype.itemsize if form is None else form.nbytes(lengths)


def _quantise(x: Tensor, parts: int, lengths: Sequence[int], text: str) -> Tensor:
    rows, form = x.reshape(parts, sum(lengths)), block_format(text)
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    if form is None:
        return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(-1)
    blocks = padded_runs(rows, lengths, form.block).unflatten(-1, (-1, form.block))
    integers, scales = form.quantised(blocks)
    values = packed_integers(integers, form.bits).flatten(-2)
    values = cut_runs(values, _value_bytes(form, lengths), form.value_bytes(form.block))
    return torch.cat((scales.flatten(-2).contiguous().view(torch.uint8), values), -1).reshape(-1)


def _dequantise(sent: Tensor, parts: int, lengths: Sequence[int], text: str, dtype: torch.dtype) -> Tensor:
    return _rows(sent, parts, lengths, text, dtype).to(dtype).reshape(-1)


def _dequantise_sum(sent: Tensor, parts: int, lengths: Sequence[int], text: str, dtype: torch.dtype) -> Tensor:
    """Sum the rows in ascending order, like the reference of a sum over ranks."""
    return reduce(torch.add, _rows(sent, parts, lengths, text, dtype).unbind()).to(dtype)


def as_sent(rows: Tensor, parts: int, text: str) -> Tensor:
    """Return equal rows as they arrive, in one run each, flat and not yet rounded to their dtype."""
    lengths = [rows.numel() // parts]
    return _rows(_quantise(rows, parts, lengths, text), parts, lengths, text, rows.dtype).reshape(-1)


def _rows(sent: Tensor, parts: int, lengths: Sequence[int], text: str, dtype: torch.dtype) -> Tensor:
    if not sent.numel():
        return sent.new_empty((parts, 0), dtype=dtype)
    rows, form = sent.reshape(parts, -1), block_format(text)
    if form is None:
        return rows.clone().view(dtype)  # a copy is aligned, and owns its memory
    count = sum(map(form.blocks, lengths))
    scales, values = rows[:, : 4 * count].clone(memory_format=torch.contiguous_format), rows[:, 4 * count :]
    values = padded_runs(values, _value_bytes(form, lengths), form.value_bytes(form.block)).contiguous()
    integers = unpacked_integers(values, form.bits).unflatten(-1, (count, form.block))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = integers.to(wide) * scales.view(torch.float32).to(wide).unsqueeze(-1)
    return cut_runs(found.flatten(-2), lengths, form.block)


def _value_bytes(form: BlockFormat, lengths: Sequence[int]) -> list[int]:
    return [form.value_bytes(length) for length in lengths]


def _fake_sent(x: Tensor, parts: int, lengths: Sequence[int], text: str) -> Tensor:
    return x.new_empty(parts * wire_bytes(lengths, text, x.dtype), dtype=torch.uint8)


QUANTISE = define_op(
    "quantise(Tensor x, int parts, int[] lengths, str format) -> Tensor", _quantise, _fake_sent, _quantise
)
DEQUANTISE = define_op(
    "dequantise(Tensor sent, int parts, int[] lengths, str format, ScalarType dtype) -> Tensor",
    _dequantise,
    lambda sent, parts, lengths, text, dtype: sent.new_empty(parts * sum(lengths), dtype=dtype),
    _dequantise,
)
DEQUANTISE_SUM = define_op(
    "dequantise_sum(Tensor sent, int parts, int[] lengths, str format, ScalarType dtype) -> Tensor",
    _dequantise_sum,
    lambda sent, parts, lengths, text, dtype: sent.new_empty(sum(lengths), dtype=dtype),
    _dequantise_sum,
)
