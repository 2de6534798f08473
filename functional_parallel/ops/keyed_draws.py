"""Keyed draws: their sharding rule, and their use in place of draws from torch's generators.

A shard gets the numbers of the full tensor at its positions, so every mesh draws the same numbers. A trace rejects
draws that are not listed here, and every draw from a generator that the caller passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..random import KEPT, OP, happens, next_site, normal, uniform
from ..rules import REPLICATED, OpContext, OpSharding, Rule, Shard, rule
from ..tracing import intercept_op

aten = torch.ops.aten

_Draw = Callable[..., Tensor]
_Unused = torch.layout | torch.memory_format | bool | None  # arguments without an effect on the numbers


def _wide(like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return torch.empty_like(like, dtype=torch.float64)
    return torch.empty_like(like, dtype=torch.float32) if like.dtype.itemsize < 4 else like


def _uniform(what: str, like: Tensor) -> Tensor:
    return uniform(next_site(what), like) if like.is_floating_point() else NotImplemented


def _normal(what: str, like: Tensor) -> Tensor:
    return normal(next_site(what), _wide(like)).to(like.dtype) if like.is_floating_point() else NotImplemented


def _integers(what: str, like: Tensor, *bounds: int) -> Tensor:
    """Draw integers in [low, high). The range is at most 2^53, because float64 cannot represent more integers."""
    low, high = (0, *bounds)[-2:]
    extent, wide = high - low, torch.empty_like(like, dtype=torch.float64)
    fits = 0 < extent <= 2**53
    return ((uniform(next_site(what), wide) * extent).floor() + low).to(like.dtype) if fits else NotImplemented


def _keyed(*ops: torch._ops.OpOverload) -> Callable[[_Draw], _Draw]:
    def register(draw: _Draw) -> _Draw:
        def keyed(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            return NotImplemented if generator is not None else draw(*args, **kwargs)

        for op in ops:
            intercept_op(op)(keyed)
        return draw

    return register


# --- New tensors, and tensors like another ---


def _new(op: torch._ops.OpOverload, what: str, draw: _Draw, default: torch.dtype | None = None) -> None:
    @intercept_op(op)
    def new(
        *args: Any, dtype: torch.dtype | None = default, device: torch.device | None = None, **_: _Unused
    ) -> Tensor:
        *bounds, size = args
        return draw(what, torch.empty(size, dtype=dtype, device=device), *bounds)


def _like(op: torch._ops.OpOverload, what: str, draw: _Draw) -> None:
    @intercept_op(op)
    def like(
        x: Tensor, *bounds: int, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: _Unused
    ) -> Tensor:
        return draw(what, torch.empty_like(x, dtype=dtype, device=device), *bounds)


_new(aten.rand.default, "torch.rand", _uniform)
_new(aten.randn.default, "torch.randn", _normal)
_new(aten.randint.default, "torch.randint", _integers, torch.int64)
_new(aten.randint.low, "torch.randint", _integers, torch.int64)
_like(aten.rand_like.default, "torch.rand_like", _uniform)
_like(aten.randn_like.default, "torch.randn_like", _normal)
_like(aten.randint_like.default, "torch.randint_like", _integers)
_like(aten.randint_like.low_dtype, "torch.randint_like", _integers)


@intercept_op(aten.randperm.default)
def _randperm(n: int, *, dtype: torch.dtype = torch.int64, device: torch.device | None = None, **_: _Unused) -> Tensor:
    drawn = _uniform("torch.randperm", torch.empty(n, dtype=torch.float64, device=device))
    return drawn.argsort(stable=True).to(dtype)


# --- Draws with a probability, or a mean and a deviation, per element ---


@_keyed(aten.bernoulli.default, aten.bernoulli.p)
def _bernoulli(x: Tensor, p: float | None = None) -> Tensor:
    return happens(x if p is None else p, x, next_site("torch.bernoulli")).to(x.dtype)


@_keyed(aten.bernoulli_.float)
def _bernoulli_(target: Tensor, p: float = 0.5) -> Tensor:
    """Draw for the dropouts that torch implements in C++: feature dropout, alpha dropout, and dropout of an LSTM."""
    return target.copy_(happens(p, target, next_site("dropout")))


@_keyed(aten.bernoulli_.Tensor)
def _bernoulli_tensor_(target: Tensor, p: Tensor) -> Tensor:
    return target.copy_(happens(p, target, next_site("bernoulli_")))


@_keyed(aten.normal.float_float)
def _normal_of_size(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: _Unused,
) -> Tensor:
    return _scaled_normal(torch.empty(size, dtype=dtype, device=device), mean, std)


@_keyed(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal_of_tensors(mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    return _scaled_normal(sum(tensors[1:], tensors[0]), mean, std)


def _scaled_normal(like: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Draw normal numbers without a derivative with respect to `mean` and `std`; torch's draw has none either."""
    with torch.no_grad():
        return _normal("torch.normal", like) * std + mean if like.is_floating_point() else NotImplemented


# --- Writes in place ---


def _writes(op: torch._ops.OpOverload, name: str, draw: _Draw) -> None:
    @_keyed(op)
    def write(x: Tensor, *args: float, **kwargs: float) -> Tensor:
        return NotImplemented if x.is_complex() else x.copy_(draw(next_site(name), _wide(x), *args, **kwargs))


def _exponential(key: Tensor, like: Tensor, lambd: float = 1.0) -> Tensor:
    """Draw exponential numbers. They are never 0, so that their logarithm is finite."""
    return -torch.log1p(-uniform(key, like)).clamp(max=-torch.finfo(like.dtype).eps / 2) / lambd


def _geometric(key: Tensor, like: Tensor, p: float) -> Tensor:
    return (torch.log1p(-uniform(key, like)) / math.log1p(-p)).floor() + 1 if p < 1 else torch.ones_like(like)


def _in_range(key: Tensor, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return uniform(key, like) * (high - low) + low


def _with_moments(key: Tensor, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return normal(key, like) * std + mean


_writes(aten.uniform_.default, "uniform_", _in_range)
_writes(aten.normal_.default, "normal_", _with_moments)
_writes(
    aten.log_normal_.default,
    "log_normal_",
    lambda key, like, mean=1.0, std=2.0: _with_moments(key, like, mean, std).exp(),
)
_writes(aten.exponential_.default, "exponential_", _exponential)
_writes(aten.geometric_.default, "geometric_", _geometric)
_writes(
    aten.cauchy_.default,
    "cauchy_",
    lambda key, like, median=0.0, sigma=1.0: median + sigma * torch.tan(math.pi * (uniform(key, like) - 0.5)),
)


@_keyed(aten.random_.to)
def _random_to_(target: Tensor, to: int) -> Tensor:
    return _random_from_(target, 0, to)


@_keyed(getattr(aten.random_, "from"))
def _random_from_(target: Tensor, low: int, to: int | None) -> Tensor:
    drawn = NotImplemented if to is None else _integers("random_", target, low, to)
    return drawn if drawn is NotImplemented else target.copy_(drawn)


# --- The sharding rule of a keyed draw ---


def _decide(step: OpContext) -> OpSharding:
    # Only the shape of `like` is read, so partial sums count as replicated.
    like, key = (operand.place for operand in step.operands)
    if isinstance(like, Shard) and isinstance(like.outer, tuple):
        like = REPLICATED  # the draws are sliced
    if isinstance(like, Shard):
        behind_keys = replace(like, dim=like.dim + step.operands[1].aval.ndim)
        return OpSharding((like, REPLICATED), (behind_keys,), of_shapes=True)
    return OpSharding((like, key), (key if isinstance(key, Shard) else REPLICATED,), of_shapes=True)


def _local(
    step: OpContext,
    like: Tensor,
    key: Tensor,
    shape: Sequence[int],
    axes: Sequence[str],
    splits: Sequence[int],
    *p: float,
) -> Tensor:
    place = step.decision.operands[0]
    if isinstance(place, Shard) and isinstance(place.outer, int):
        axes, splits = [*axes, step.axis], [*splits, place.dim, place.outer, step.parts.samples]
    return step.run(like, key, shape, axes, splits, *p)


rule([OP, KEPT], Rule(decide=_decide, local=_local))
