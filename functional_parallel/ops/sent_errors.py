"""Error feedback of a compressed sum: the error of a rank's last message is added to the next message.

A step computes new errors by one marker per sum, beside the sum. The pass of the wire formats puts the two other ops
around the sum. An error has the elements of the summand, without padding at the ends of its dims, in a wider dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ir import define_op
from .packing import packed, unpacked
from .wire import as_sent


def _with_error(x: Tensor, error: Tensor, scale: Tensor | None) -> Tensor:
    return _wide(x, error, scale).to(x.dtype).contiguous()


def _unsent(x: Tensor, error: Tensor, scale: Tensor | None, parts: int, dim: int, text: str, beta: float) -> Tensor:
    """Return the new error. The rows of an all-reduce, which has dim -1, are equal chunks of the flat value."""
    wide = _wide(x, error, scale)
    given = wide.to(x.dtype)
    flat = given.flatten()
    rows = pad(flat, (0, -flat.numel() % parts)) if dim < 0 else packed([given], parts, [dim])
    sent = as_sent(rows, parts, text)
    back = sent[: flat.numel()].view(x.shape) if dim < 0 else _unpacked(sent, parts, x.shape, dim)
    lost = wide - back
    lost = (lost if scale is None else lost / scale.to(lost.dtype)).to(error.dtype).reshape(error.shape)
    return lost.contiguous() if beta == 1 else error.lerp(lost, beta)


def _unpacked(rows: Tensor, parts: int, shape: torch.Size, dim: int) -> Tensor:
    own = [size // parts if at == dim else size for at, size in enumerate(shape)]
    return unpacked(rows, parts, 0, own, dim)


def _wide(x: Tensor, error: Tensor, scale: Tensor | None) -> Tensor:
    found = error.view(x.shape).to(torch.promote_types(x.dtype, error.dtype))
    return x + (found if scale is None else found * scale.to(found.dtype))


def _fake(x: Tensor, error: Tensor, *_: object) -> Tensor:
    return torch.empty_like(error)


WITH_ERROR = define_op(
    "with_error(Tensor x, Tensor error, Tensor? scale) -> Tensor",
    _with_error,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    _with_error,
)
UNSENT = define_op(
    "unsent(Tensor x, Tensor error, Tensor? scale, int parts, int dim, str format, float beta) -> Tensor",
    _unsent,
    _fake,
    _unsent,
)
NEW_ERROR = define_op(  # of the sum, over the first of some axes or several, of a parameter's gradient
    "new_error(Tensor error, Tensor sum, Tensor? scale, str[] axes, str parameter, float beta) -> Tensor",
    lambda error, *_: error.clone(),
    lambda error, *_: torch.empty_like(error),
    lambda error, *_: error * 1,
)
