"""Ops for AdamW's update with torch's fused kernel: one for one parameter, one for many parameters in place.

The update of an element depends only on its values, and is the same in a parameter and in a shard of it. The CPU's
kernel rounds the elements after the last full vector differently, so both ops pass it full vectors only. CUDA's has one
formula for every element. It gets the tensors unchanged, and nothing waits for a number on the device. An update with
a true `skip` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import _torch
from ..ir import define_op, in_main_memory

if TYPE_CHECKING:
    from typing_extensions import Unpack


T = TypeVar("T")
Triple = tuple[Tensor, Tensor, Tensor]
Options = tuple[Tensor, Tensor, float, float, float, float]  # as in `_OPTIONS`

_OPTIONS = "Tensor step, Tensor lr, float beta1, float beta2, float eps, float weight_decay, Tensor? skip=None"
_NAMES = ("parameter", "gradient", "mean", "square")
_VECTOR = 64  # elements in a cache line of the narrowest dtype; the kernel works on cache lines


def adamw_of_one(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Unpack[Options]) -> Triple:
    _require_alike(p, g, m, v)
    if _torch.has_functorch_level((p, g, m, v)):
        return adamw_formula(p, g, m, v, *options)
    found: Triple = ADAMW(p, g, m, v, *options)
    return found


def _require_alike(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Check shapes and dtypes. Torch's kernel does not check the sizes and writes past the ends of shorter tensors."""
    if p.shape == g.shape == m.shape == v.shape and p.dtype == g.dtype == m.dtype == v.dtype:
        return
    signatures = (f"{name} {tuple(x.shape)} {x.dtype}" for name, x in zip(_NAMES, (p, g, m, v), strict=True))
    raise ValueError(
        f"adamw updates parameter, gradient and moments of one shape and dtype, not {', '.join(signatures)}; give it "
        "the gradients of these parameters, and the state that `init` or `update` returned for them"
    )


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> Triple:
    p, m, v = (x.clone(memory_format=torch.contiguous_format) for x in (p, m, v))
    _adamw_([p, m, v], [g], *options)
    return p, m, v


def _adamw_(held: Sequence[Tensor], g: Sequence[Tensor], *given: Any) -> list[Tensor]:
    options, skip = _parted(given)
    if skip is not None and in_main_memory(skip) and bool(skip):
        return list(held)
    if _torch.has_fused_adamw(held[0], options[1]):
        _fused(held, g, skip, *options)
    else:
        rows = zip(*_by_kind(held), g, strict=True)
        for p, m, v, gradient in rows:
            for x, new in zip((p, m, v), adamw_formula(p, gradient, m, v, *given), strict=True):
                x.copy_(new)
    return list(held)


def _parted(given: Sequence[Any]) -> tuple[Options, Tensor | None]:
    step, lr, beta1, beta2, eps, decay, *skip = given
    return (step, lr, beta1, beta2, eps, decay), skip[0] if skip else None


def _by_kind(held: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    count = len(held) // 3
    return held[:count], held[count : 2 * count], held[2 * count :]


def _fused(held: Sequence[Tensor], g: Sequence[Tensor], skip: Tensor | None, *options: Unpack[Options]) -> None:
    step, lr, beta1, beta2, eps, decay = options
    pieces = list(map(_in_vectors, held))
    p, m, v = ([piece for each in kind for piece in each] for kind in _by_kind(pieces))
    gradients = [piece for x in g for piece in _in_vectors(x)]
    _torch.fused_adamw_(p, gradients, m, v, step, lr, beta1, beta2, decay, eps, skip)
    for x, each in zip(held, pieces, strict=True):
        _put_back(x, each)


def _in_vectors(x: Tensor) -> list[Tensor]:
    count = x.numel()
    whole = count - count % _VECTOR
    if whole == count or not in_main_memory(x):
        return [x.contiguous()]
    flat = x.reshape(-1)
    rest = flat.new_zeros(_VECTOR)
    rest[: count - whole] = flat[whole:]
    return [flat[:whole], rest] if whole else [rest]


def _put_back(x: Tensor, pieces: Sequence[Tensor]) -> None:
    count = x.numel()
    left = count % _VECTOR
    if not x.is_contiguous():
        x.copy_(torch.cat([piece.reshape(-1) for piece in pieces])[:count].view(x.shape))
    elif pieces[-1] is not x:
        x.view(-1)[count - left :] = pieces[-1][:left]


def adamw_formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *given: Any) -> Triple:
    (step, lr, beta1, beta2, eps, decay), skip = _parted(given)
    if skip is not None:
        new = adamw_formula(p, g, m, v, *given[:6])
        return tuple(torch.where(skip, x, y) for x, y in zip((p, m, v), new, strict=True))  # type: ignore[return-value]
    lr, step = lr.to(p.dtype), step.to(p.dtype)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    square = v / (1 - beta2**step)
    unused = square == 0  # the derivative of the root would be infinite there
    denominator = torch.where(unused, 0, torch.where(unused, 1, square).sqrt()) + eps
    return p * (1 - lr * decay) - lr / (1 - beta1**step) * m / denominator, m, v


def _formulas(held: Sequence[Tensor], g: Sequence[Tensor], *options: Any) -> list[Tensor]:
    rows = zip(*_by_kind(held), g, strict=True)
    new = [adamw_formula(p, gradient, m, v, *options) for p, m, v, gradient in rows]
    return [x for kind in zip(*new, strict=True) for x in kind]


def _fake(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Any) -> Triple:
    _require_alike(p, g, m, v)
    return torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)


def _fake_in_place(held: Sequence[Tensor], g: Sequence[Tensor], *_: Any) -> list[Tensor]:
    p, m, v = _by_kind(held)
    for each in zip(p, g, m, v, strict=True):
        _require_alike(*each)
    return list(held)


ADAMW = define_op(
    f"adamw(Tensor p, Tensor g, Tensor m, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _adamw,
    _fake,
    adamw_formula,
)
ADAMW_IN_PLACE = define_op(  # held: all p, all m, all v
    f"adamw_(Tensor(a!)[] held, Tensor[] g, {_OPTIONS}) -> Tensor(a!)[]", _adamw_, _fake_in_place, _formulas
)
