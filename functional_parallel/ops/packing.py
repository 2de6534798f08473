"""Ops that pack several tensors into one, which a bucket of collectives sends.

A packed tensor is flat and consists of `parts` equal runs, one per rank of a scatter or gather (one run for a sum). The
run of a rank concatenates the rank's slices of all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir import define_op


def run_of(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    return x.reshape(1, -1) if parts == 1 else x.unflatten(dim, (parts, -1)).movedim(dim, 0).reshape(parts, -1)


def packed(tensors: Sequence[torch.Tensor], parts: int, dims: Sequence[int]) -> torch.Tensor:
    return torch.cat([run_of(x, parts, dim) for x, dim in zip(tensors, dims, strict=True)], 1).reshape(-1)


def _unpack(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    joined = _joined(packed, parts, offset, shape, dim)
    return joined.clone() if joined.data_ptr() == packed.data_ptr() else joined.contiguous()


def unpacked(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    """Unpack like the op `unpack`, written in torch's ops for a compiler. The result owns its memory."""
    return _joined(packed, parts, offset, shape, dim).clone(memory_format=torch.contiguous_format)


def _joined(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    return _parts(packed, parts, offset, shape).movedim(0, dim).flatten(dim, dim + 1)


def _parts(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int]) -> torch.Tensor:
    length = torch.Size(shape).numel()
    return packed.view(parts, -1)[:, offset : offset + length].reshape(parts, *shape)


def _unpack_into(
    target: torch.Tensor, packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int
) -> torch.Tensor:
    target.unflatten(dim, (parts, -1)).copy_(_parts(packed, parts, offset, shape).movedim(0, dim))
    return target


def _fake_unpack(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    whole = list(shape)
    whole[dim] *= parts
    return packed.new_empty(whole)


def _slice_scatter_(
    target: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    torch.ops.aten.slice.Tensor(target, dim, start, end, step).copy_(src)
    return target


PACK = define_op(
    "pack(Tensor[] tensors, int parts, int[] dims) -> Tensor",
    packed,
    lambda tensors, parts, dims: tensors[0].new_empty(sum(x.numel() for x in tensors)),
    packed,
)
UNPACK = define_op(
    "unpack(Tensor packed, int parts, int offset, int[] shape, int dim) -> Tensor", _unpack, _fake_unpack, unpacked
)
UNPACK_INTO = define_op(
    "unpack_(Tensor(a!) target, Tensor packed, int parts, int offset, int[] shape, int dim) -> Tensor(a!)",
    _unpack_into,
    lambda target, *packed: target,
    lambda target, *packed: unpacked(*packed),
)
SLICE_SCATTER_IN_PLACE = define_op(
    "slice_scatter_(Tensor(a!) target, Tensor src, int dim=0, int? start=None, int? end=None, int step=1)"
    " -> Tensor(a!)",
    _slice_scatter_,
    lambda target, *given, **named: target,
    torch.ops.aten.slice_scatter.default,
)
