"""Zero tangents. torch creates them without memory and computes only their shapes; a trace records them as zeros.

torch's zero tensors (`_efficientzerotensor`) lose their trace when they are viewed, for example by nested vmaps. They
then become tensors of the meta device, and so do results computed with them. Two properties are preserved. A product
with a zero tensor is zero for any other factor, and a sum with a zero tensor is the other summand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .writer import Writer

__all__ = ["MADE", "with_zeros"]

aten = torch.ops.aten

MADE = aten._efficientzerotensor.default


def with_zeros(recording: Writer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an op on zero tangents. NotImplemented for any other op, and for an op without a shortcut."""
    if func is MADE:
        options = {key: kwargs.get(key) for key in ("dtype", "device")}
        return _zeros(recording, list(args[0]), {key: value for key, value in options.items() if value is not None})
    rule = _RULES.get(func)
    which = [isinstance(arg, torch.Tensor) and recording.value(arg) in recording.zeros for arg in args[:2]]
    return rule(recording, func, args, kwargs, which) if rule is not None and any(which) else NotImplemented


def _zeros(recording: Writer, shape: list[int], options: dict[str, Any]) -> torch.Tensor:
    made = aten.zeros.default(shape, **options)
    recording.zeros.add(recording.write(aten.zeros.default, (shape,), options, made))
    return made  # type: ignore[no-any-return]


def _is_zero(recording: Writer, func: Any, args: Any, kwargs: Any, which: list[bool]) -> Any:
    result = func(*args, **kwargs)
    return _zeros(recording, list(result.shape), {"dtype": result.dtype, "device": result.device})


def _quotient(recording: Writer, func: Any, args: Any, kwargs: Any, which: list[bool]) -> Any:
    return _is_zero(recording, func, args, kwargs, which) if which[0] else NotImplemented


def _sum(recording: Writer, func: Any, args: Any, kwargs: Any, which: list[bool]) -> Any:
    if all(which):
        return _is_zero(recording, func, args, kwargs, which)
    result, factor = func(*args, **kwargs), kwargs.get("alpha", 1) * (-1 if func is aten.sub.Tensor else 1)
    with recording:
        other = args[0] if which[1] else args[1] if factor == 1 else aten.mul.Scalar(args[1], factor)
        return aten._to_copy.default(aten.expand.default(other, list(result.shape)), dtype=result.dtype)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([aten.mul.Tensor, aten.mul.Scalar], _is_zero),
    **dict.fromkeys([aten.div.Tensor, aten.div.Scalar], _quotient),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor], _sum),
    **dict.fromkeys(
        [
            aten.alias.default,
            aten.detach.default,
            aten.expand.default,
            aten.neg.default,
            aten.permute.default,
            aten.select.int,
            aten.slice.Tensor,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.t.default,
            aten.transpose.int,
            aten.unsqueeze.default,
            aten.view.default,
        ],
        _is_zero,
    ),
}
