"""Tangents that are zero, which torch makes without memory and computes with by shape alone; here they are zeros.

torch's own (`_efficientzerotensor`) forget that they belong to a trace as soon as they are viewed, as every second vmap
does: they are tensors of the meta device then, and so is what they meet. What torch knows of them is kept: a product
with one is zero whatever the other factor is, and a sum the other summand.
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
    """Record an op of zero tangents; NotImplemented for any other, and for one that has no short cut."""
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
