"""Replace draws from torch's generators by draws from the ambient key, so that every mesh draws the same numbers.

A trace records these instead of `torch.rand` and related functions. `tracing.draws` rejects draws that are not listed
here, and every draw from a generator that the caller passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..random import happens, next_site, normal, uniform
from ..tracing import intercept_op

__all__: list[str] = []

aten = torch.ops.aten


def _wide(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with a dtype of enough digits: at least float32, float64 for integers."""
    if not like.is_floating_point():
        return torch.empty_like(like, dtype=torch.float64)
    return torch.empty_like(like, dtype=torch.float32) if like.dtype.itemsize < 4 else like


def _uniform(what: str, like: torch.Tensor) -> torch.Tensor:
    return uniform(next_site(what), like)


def _normal(what: str, like: torch.Tensor) -> torch.Tensor:
    return normal(next_site(what), _wide(like)).to(like.dtype)


def _integers(what: str, low: int, high: int, like: torch.Tensor) -> Any:
    """Draw integers in [low, high). The range is at most 2^53, because float64 cannot represent more integers."""
    if high <= low or high - low > 2**53:
        return NotImplemented
    drawn = uniform(next_site(what), torch.empty_like(like, dtype=torch.float64))
    return ((drawn * (high - low)).floor() + low).to(like.dtype)


# -----------------------------------------------------------------------------
# New tensors
# -----------------------------------------------------------------------------


def _empty(size: Sequence[int], dtype: Any, device: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@intercept_op(aten.rand.default)
def _rand(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    like = _empty(size, dtype, device)
    return _uniform("torch.rand", like) if like.is_floating_point() else NotImplemented


@intercept_op(aten.randn.default)
def _randn(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    like = _empty(size, dtype, device)
    return _normal("torch.randn", like) if like.is_floating_point() else NotImplemented


@intercept_op(aten.randint.default)
def _randint(high: int, size: Any, *, dtype: Any = torch.int64, device: Any = None, **_: Any) -> Any:
    return _integers("torch.randint", 0, high, _empty(size, dtype, device))


@intercept_op(aten.randint.low)
def _randint_low(low: int, high: int, size: Any, *, dtype: Any = torch.int64, device: Any = None, **_: Any) -> Any:
    return _integers("torch.randint", low, high, _empty(size, dtype, device))


@intercept_op(aten.randperm.default)
def _randperm(n: int, *, dtype: Any = torch.int64, device: Any = None, **_: Any) -> Any:
    """Return the sort order of n drawn numbers."""
    drawn = _uniform("torch.randperm", _empty((n,), torch.float64, device))
    return drawn.argsort(stable=True).to(dtype)


# -----------------------------------------------------------------------------
# Tensors like another
# -----------------------------------------------------------------------------


@intercept_op(aten.rand_like.default)
def _rand_like(x: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    like = torch.empty_like(x, dtype=dtype, device=device)
    return _uniform("torch.rand_like", like) if like.is_floating_point() else NotImplemented


@intercept_op(aten.randn_like.default)
def _randn_like(x: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    like = torch.empty_like(x, dtype=dtype, device=device)
    return _normal("torch.randn_like", like) if like.is_floating_point() else NotImplemented


@intercept_op(aten.randint_like.default)
def _randint_like(x: torch.Tensor, high: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _integers("torch.randint_like", 0, high, torch.empty_like(x, dtype=dtype, device=device))


@intercept_op(aten.randint_like.low_dtype)
def _randint_like_low(x: torch.Tensor, low: int, high: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _integers("torch.randint_like", low, high, torch.empty_like(x, dtype=dtype, device=device))


# -----------------------------------------------------------------------------
# Draws with a probability, or a mean and a deviation, per element
# -----------------------------------------------------------------------------


@intercept_op(aten.bernoulli.default)
def _bernoulli(p: torch.Tensor, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else happens(p, p, next_site("torch.bernoulli")).to(p.dtype)


@intercept_op(aten.bernoulli.p)
def _bernoulli_p(x: torch.Tensor, p: float, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else happens(p, x, next_site("torch.bernoulli")).to(x.dtype)


@intercept_op(aten.bernoulli_.float)
def _bernoulli_(target: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Draw for the dropouts that torch implements in C++: feature dropout, alpha dropout, and dropout of an LSTM."""
    return NotImplemented if generator is not None else target.copy_(happens(p, target, next_site("dropout")))


@intercept_op(aten.bernoulli_.Tensor)
def _bernoulli_tensor_(target: torch.Tensor, p: torch.Tensor, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else target.copy_(happens(p, target, next_site("bernoulli_")))


@intercept_op(aten.normal.float_float)
def _normal_of_size(
    mean: float, std: float, size: Any, *, generator: Any = None, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return _normal_of(_empty(size, dtype, device), mean, std, generator)


@intercept_op(aten.normal.Tensor_float)
def _normal_of_mean(mean: torch.Tensor, std: float = 1.0, *, generator: Any = None) -> Any:
    return _normal_of(mean, mean, std, generator)


@intercept_op(aten.normal.float_Tensor)
def _normal_of_std(mean: float, std: torch.Tensor, *, generator: Any = None) -> Any:
    return _normal_of(std, mean, std, generator)


@intercept_op(aten.normal.Tensor_Tensor)
def _normal_of_both(mean: torch.Tensor, std: torch.Tensor, *, generator: Any = None) -> Any:
    return _normal_of(mean + std, mean, std, generator)


def _normal_of(like: torch.Tensor, mean: Any, std: Any, generator: Any) -> Any:
    """Draw normal numbers without a derivative with respect to `mean` and `std`; torch's draw has none either."""
    if generator is not None or not like.is_floating_point():
        return NotImplemented
    with torch.no_grad():
        return _normal("torch.normal", like) * std + mean


# -----------------------------------------------------------------------------
# Writes in place
# -----------------------------------------------------------------------------


def _writes(op: Any, name: str, draw: Callable[..., torch.Tensor]) -> None:
    """Register an in-place draw that is a function of a uniform or normal number."""

    def write(target: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None or target.is_complex():
            return NotImplemented
        return target.copy_(draw(next_site(name), _wide(target), *args, **kwargs))

    intercept_op(op)(write)


def _exponential(key: torch.Tensor, like: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    """Draw exponential numbers. They are never 0, so that their logarithm is finite."""
    return -torch.log1p(-uniform(key, like)).clamp(max=-torch.finfo(like.dtype).eps / 2) / lambd


def _geometric(key: torch.Tensor, like: torch.Tensor, p: float) -> torch.Tensor:
    return (torch.log1p(-uniform(key, like)) / math.log1p(-p)).floor() + 1 if p < 1 else torch.ones_like(like)


def _in_range(key: torch.Tensor, like: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return uniform(key, like) * (high - low) + low


def _with_moments(key: torch.Tensor, like: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
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


@intercept_op(aten.random_.to)
def _random_to_(target: torch.Tensor, to: int, *, generator: Any = None) -> Any:
    return _random_from_(target, 0, to, generator=generator)


@intercept_op(getattr(aten.random_, "from"))
def _random_from_(target: torch.Tensor, low: int, to: int | None, *, generator: Any = None) -> Any:
    if generator is not None or to is None:
        return NotImplemented
    drawn = _integers("random_", low, to, target)
    return drawn if drawn is NotImplemented else target.copy_(drawn)
