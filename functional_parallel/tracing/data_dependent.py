"""Replacements of torch functions that read values, which a trace does not have.

torch reads values to count elements or to find invalid arguments, such as a negative variance or weights that sum to
zero. The replacements do not check, so an invalid argument shows in the results instead. Conversion to numpy raises an
error if the values are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import NotImplementedType
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Argument
from torch.nn import functional

from .. import _torch
from ..errors import TracingError
from ..ir import current_source
from .constant_folding import outside_trace, value_of
from .interception import Replaced, intercept, intercept_op
from .record import recorder

__all__: list[str] = []

aten = torch.ops.aten


@intercept(_torch.is_all_true, always=True)
def _are_valid(valid: Tensor) -> bool:
    """Assume that parameters and samples of torch.distributions are valid, as torch.compile does."""
    return True


@intercept(functional.one_hot, always=True)
def _one_hot(tensor: Tensor, num_classes: int = -1) -> Replaced:
    """Compute one_hot by comparison with the class indices.

    torch's own function reads the smallest and the largest class, unless it detects a tensor without values. It does
    not detect one under a torch.func transform, or for a constant that the function closes over.
    """
    if tensor.dtype != torch.int64:  # torch raises the error
        return NotImplemented
    value = _known(tensor)
    if value is not None and value.numel():
        with outside_trace():  # the extremes suffice for the check and the number of classes
            num_classes = functional.one_hot(torch.stack(value.aminmax()), num_classes).shape[-1]
    if num_classes < 1:
        return NotImplemented
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


# --- Writes at the positions of a mask or an index, recorded as torch.where ---


@intercept_op(aten.index_put.default)
def _put_where(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Replaced:
    """Record `x[mask] = values` as `torch.where`, for values that do not vary along the masked dims."""
    # torch's derivative would count the true elements, which a trace cannot do.
    masks = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or masks[0][1].dtype != torch.bool:
        return NotImplemented
    dim, mask = masks[0]
    trailing = x.ndim - dim - mask.ndim
    if values.ndim > trailing:
        ahead, (each, *rest) = values.shape[: values.ndim - trailing - 1], values.shape[values.ndim - trailing - 1 :]
        if each != 1:
            return NotImplemented
        values = values.reshape(*ahead, *[1] * mask.ndim, *rest)
    mask = mask.reshape(*mask.shape, *[1] * trailing)
    return torch.where(mask, x + values if accumulate else values, x)


@intercept_op(aten.index_fill.int_Tensor)
def _fill_where(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """Record index_fill as `torch.where`. torch's derivative would read the indices to find duplicates."""
    if x.ndim == 0:
        return _fill_where(x.reshape(1), 0, index, value).reshape(())
    size = x.shape[dim]
    none = torch.zeros(size, dtype=torch.bool, device=x.device)
    chosen = none.scatter(0, index.reshape(-1).long() % size, True)
    return torch.where(chosen.reshape([-1 if each == dim % x.ndim else 1 for each in range(x.ndim)]), value, x)


# --- Losses and statistics ---


@intercept(functional.gaussian_nll_loss, always=True)
def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Replaced:
    if isinstance(var, float) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.ndim != input.ndim or any(
        size not in (1, whole) for size, whole in zip(var.shape, input.shape, strict=True)
    ):
        raise ValueError(
            f"gaussian_nll_loss: var of shape {tuple(var.shape)} is not one of input's {tuple(input.shape)}"
        )
    bounded = var.clone()
    with torch.no_grad():
        bounded.clamp_(min=eps)
    loss = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


@intercept(torch.cov, always=True)
def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Replaced:
    if fweights is not None or aweights is not None or input.ndim > 2:
        return NotImplemented
    centred = _centred(input)
    return (centred @ centred.mH / max(centred.shape[1] - correction, 0)).squeeze()


@intercept(torch.corrcoef, always=True)
def _corrcoef(input: Tensor) -> Replaced:
    if input.ndim > 2 or input.is_complex():
        return NotImplemented
    centred = _centred(input)
    directions = centred / (centred * centred).sum(1, keepdim=True).sqrt()
    return (directions @ directions.mT).clamp(-1, 1).squeeze()


def _centred(input: Tensor) -> Tensor:
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    return rows - rows.sum(1, keepdim=True) / rows.shape[1]


def _linear_cross_entropy(
    *args: Argument, options: Mapping[str, Argument] | None = None, **kwargs: Argument
) -> Replaced:
    # The op for chunks computes its gradient together with its value, so transforms cannot differentiate it.
    return NotImplemented if options is None else functional.linear_cross_entropy(*args, **kwargs)


if hasattr(functional, "linear_cross_entropy"):  # torch 2.13
    intercept(functional.linear_cross_entropy, always=True)(_linear_cross_entropy)


# --- Values of constants ---


_index: Callable[[Tensor, Sequence[Tensor | None]], Tensor] = aten.index.Tensor


@intercept_op(aten.index.Tensor)
def _index_by_numbers(x: Tensor, indices: Sequence[Tensor | None]) -> Replaced:
    if not any(index is not None and index.dtype == torch.bool for index in indices):
        return NotImplemented
    return _index(x, _numbers(indices))


@intercept_op(aten.masked_select.default)
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return _index(x.expand(shape), _numbers([mask.expand(shape)]))


def _numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index in indices:
        found += index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else [index]
    return found


@intercept(Tensor.tolist, always=True)
def _tolist(x: Tensor) -> list[Any] | float | NotImplementedType:
    value = _known(x)
    if value is None:
        return NotImplemented
    with outside_trace():
        return value.tolist()


def _to_numpy(function: Callable[..., Any]) -> None:
    def read(x: Tensor, *args: Argument, **kwargs: Argument) -> Argument:
        value = _known(x)
        if value is None:
            raise TracingError(
                f"{current_source() or 'the function'}: numpy needs a tensor's values, which a traced function does "
                "not have; write it with torch, or compute it outside and pass it in as an argument"
            )
        with outside_trace():  # the modes of the trace would return a tensor without values
            return function(value, *args, **kwargs)

    intercept(function, always=True)(read)


_to_numpy(Tensor.numpy)
_to_numpy(Tensor.__array__)


def _known(x: Tensor) -> Tensor | None:
    active = recorder()
    if active is None or _torch.mapped_dims(x):
        return None
    plain = _torch.unwrap(x)
    with _torch.disable_functorch():  # else new constants would belong to the transform
        return value_of(active, plain)
