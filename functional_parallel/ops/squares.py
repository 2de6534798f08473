"""Sum of squares of many tensors as one op, which allocates no temporary of the size of a large tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch
from ..ir import as_real, define_op, in_main_memory

_BLOCK = 1 << 16  # elements squared at a time: they stay in the processor's cache


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, at least in float32: squares above 255² overflow float16."""
    tensors = list(map(as_real, tensors))
    if _torch.has_functorch_level(tensors):
        return _in_torchs_ops(tensors)
    result: Tensor = _OP(tensors)
    return result


def _in_torchs_ops(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, ((x * x).sum() for x in map(_wide, tensors)))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, map(_sum_of_one, tensors)) if in_main_memory(tensors[0]) else _at_once(tensors)


def _at_once(tensors: Sequence[Tensor]) -> Tensor:
    alike: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        alike.setdefault(x.dtype, []).append(x)
    sums = (torch.stack(_torch.norms(of_dtype)).square().sum() for of_dtype in alike.values())
    return functools.reduce(torch.add, sums)


def _sum_of_one(x: Tensor) -> Tensor:
    if x.numel() <= _BLOCK or not x.is_contiguous():
        x = _wide(x)
        return (x * x).sum()
    squares = _wide(x.new_empty(_BLOCK))
    sums = [_square(block, squares[: block.numel()]).sum() for block in x.view(-1).split(_BLOCK)]
    return torch.stack(sums).sum()


def _square(x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, x, out=out) if x.dtype == out.dtype else out.copy_(x).square_()


def _fake(tensors: Sequence[Tensor]) -> Tensor:
    dtype = functools.reduce(torch.promote_types, dict.fromkeys(x.dtype for x in tensors))
    dtype = dtype if dtype.itemsize >= 4 else torch.float32
    return tensors[0].new_empty((), dtype=dtype)


_OP = define_op("sum_of_squares(Tensor[] tensors) -> Tensor", _sum, _fake, _in_torchs_ops)
