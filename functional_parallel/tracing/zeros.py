"""Zero tangents. torch creates them without memory and computes only their shapes; a trace records them as zeros.

torch's zero tensors (`_efficientzerotensor`) lose their trace when they are viewed, for example by nested vmaps. They
then become tensors of the meta device, and so do results computed with them. Two properties are preserved. A product
with a zero tensor is zero for any other factor, and a sum with a zero tensor is the other summand.
"""

from __future__ import annotations

import torch

from .. import _torch
from ..ir import VIEWS, Args, Kwargs
from .interception import Replaced
from .writer import Writer

__all__ = ["MADE", "with_zeros"]

aten = torch.ops.aten

MADE = aten._efficientzerotensor.default


def with_zeros(recording: Writer, func: _torch.Op, args: Args, kwargs: Kwargs) -> Replaced:
    """Record an op on zero tangents. NotImplemented for any other op, and for an op without a shortcut."""
    which = [isinstance(arg, torch.Tensor) and recording.value(arg) in recording.zeros for arg in args[:2]]
    is_zero = func is MADE or (func in _SCALED and any(which)) or (func in _QUOTIENTS and which[0])
    if is_zero or (func in _SUMS and all(which)):
        like = func(*args, **kwargs)
        shape, options = list(like.shape), {"dtype": like.dtype, "device": like.device}
        made: torch.Tensor = aten.zeros.default(shape, **options)
        recording.zeros.add(recording.write(aten.zeros.default, (shape,), options, made))
        return made
    return _sum(recording, func, args, kwargs, which) if func in _SUMS and any(which) else NotImplemented


def _sum(recording: Writer, func: _torch.Op, args: Args, kwargs: Kwargs, which: list[bool]) -> torch.Tensor:
    result, factor = func(*args, **kwargs), kwargs.get("alpha", 1) * (-1 if func is aten.sub.Tensor else 1)
    with recording:
        other = args[0] if which[1] else args[1] if factor == 1 else aten.mul.Scalar(args[1], factor)
        total: torch.Tensor = aten._to_copy.default(aten.expand.default(other, list(result.shape)), dtype=result.dtype)
    return total


_SCALED = {*VIEWS, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
