"""Ops that pack several tensors into one, which a bucket of collectives sends.

A packed tensor is flat and consists of `parts` equal runs, one per rank of a scatter or gather (one run for a sum). The
run of a rank concatenates the rank's slices of all tensors. One collective along dim 0 of the packed tensor then
replaces one collective per tensor along its own dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir import register_differentiable

__all__ = ["PACK", "UNPACK", "UNPACK_INTO", "packed", "run_of", "unpacked"]

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("pack(Tensor[] tensors, int parts, int[] dims) -> Tensor")
_library.define("unpack(Tensor packed, int parts, int offset, int[] shape, int dim) -> Tensor")
_library.define("unpack_(Tensor(a!) target, Tensor packed, int parts, int offset, int[] shape, int dim) -> Tensor(a!)")


def run_of(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """Return the slices of `x` for all runs, with shape (parts, elements)."""
    return x.reshape(1, -1) if parts == 1 else x.unflatten(dim, (parts, -1)).movedim(dim, 0).reshape(parts, -1)


def packed(tensors: Sequence[torch.Tensor], parts: int, dims: Sequence[int]) -> torch.Tensor:
    """Pack tensors into one flat tensor of concatenated runs."""
    return torch.cat([run_of(x, parts, dim) for x, dim in zip(tensors, dims, strict=True)], 1).reshape(-1)


def _unpack(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    """Unpack the tensor with a slice of shape `shape` at `offset` in each run; concatenate the slices along `dim`."""
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
    """Unpack a tensor like `_unpack`, into the existing tensor `target`."""
    target.unflatten(dim, (parts, -1)).copy_(_parts(packed, parts, offset, shape).movedim(0, dim))
    return target


def _fake_pack(tensors: Sequence[torch.Tensor], parts: int, dims: Sequence[int]) -> torch.Tensor:
    return tensors[0].new_empty(sum(x.numel() for x in tensors))


def _fake_unpack(packed: torch.Tensor, parts: int, offset: int, shape: Sequence[int], dim: int) -> torch.Tensor:
    whole = list(shape)
    whole[dim] *= parts
    return packed.new_empty(whole)


def _fake_unpack_into(target: torch.Tensor, *_: object) -> torch.Tensor:
    return target


_library.impl("pack", packed, "CompositeExplicitAutograd")
_library.impl("unpack", _unpack, "CompositeExplicitAutograd")
_library.impl("unpack_", _unpack_into, "CompositeExplicitAutograd")
torch.library.register_fake("fp::unpack_", _fake_unpack_into, lib=_library)
torch.library.register_fake("fp::pack", _fake_pack, lib=_library)
torch.library.register_fake("fp::unpack", _fake_unpack, lib=_library)
PACK = torch.ops.fp.pack.default
UNPACK = torch.ops.fp.unpack.default
UNPACK_INTO = torch.ops.fp.unpack_.default
register_differentiable(PACK, packed)
register_differentiable(UNPACK, unpacked)
register_differentiable(UNPACK_INTO, lambda target, *packed: unpacked(*packed))
