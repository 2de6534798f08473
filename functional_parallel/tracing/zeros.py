"""Zero tangents. torch creates them without memory and computes only their shapes; a trace records them as zeros.

torch's zero tensors (`_efficientzerotensor`) lose their trace when they are viewed, for example by nested vmaps. They
then become tensors of the meta device, and so do results computed with them. Two properties are preserved. A product
with a zero tensor is zero for any other factor, and a sum with a zero tensor is the other summand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    if func is MADE:
        options = {key: kwargs.get(key) for key in ("dtype", "device")}
        return _zeros(recording, list(args[0]), {key: value for key, value in options.items() if value is not None})
    rule = _RULES.get(func)
    which = [isinstance(arg, torch.Tensor) and recording.value(arg) in recording.zeros for arg in args[:2]]
    return rule(recording, func, args, kwargs, which) if rule is not None and any(which) else NotImplemented


def _zeros(recording: Writer, shape: list[int], options: dict[str, Any]) -> torch.Tensor:
    made: torch.Tensor = aten.zeros.default(shape, **options)
    recording.zeros.add(recording.write(aten.zeros.default, (shape,), options, made))
    return made


def _is_zero(recording: Writer, func: _torch.Op, args: Args, kwargs: Kwargs, which: list[bool]) -> torch.Tensor:
    result = func(*args, **kwargs)
    return _zeros(recording, list(result.shape), {"dtype": result.dtype, "device": result.device})


def _quotient(recording: Writer, func: _torch.Op, args: Args, kwargs: Kwargs, which: list[bool]) -> Replaced:
    return _is_zero(recording, func, args, kwargs, which) if which[0] else NotImplemented


def _sum(recording: Writer, func: _torch.Op, args: Args, kwargs: Kwargs, which: list[bool]) -> torch.Tensor:
    if all(which):
        return _is_zero(recording, func, args, kwargs, which)
    result, factor = func(*args, **kwargs), kwargs.get("alpha", 1) * (-1 if func is aten.sub.Tensor else 1)
    with recording:
        other = args[0] if which[1] else args[1] if factor == 1 else aten.mul.Scalar(args[1], factor)
        total: torch.Tensor = aten._to_copy.default(aten.expand.default(other, list(result.shape)), dtype=result.dtype)
    return total


_RULES: dict[_torch.Op, Callable[..., Replaced]] = {
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], _is_zero),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], _quotient),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor], _sum),
    **dict.fromkeys([*VIEWS, aten.neg.default], _is_zero),
}
