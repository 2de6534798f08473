"""Learning rates from plain Python functions, evaluated on the host with the number of updates as an integer.

Such a function becomes one op of the number of updates. Reading that number from a device would wait for the device, so
a training state counts its updates on the host too. If the two counts differ, the rate is NaN, which stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any

import torch

from ..ir import before_launches, define_op, in_main_memory, is_recording

Counts = dict[str, int]  # the number of updates done, by the name of the function that reads it

_functions: dict[str, Callable[[Any], Any]] = {}
_names: dict[int, str] = {}
_counts: ContextVar[Counts | None] = ContextVar("counts", default=None)


def rate_on_host(function: Callable[[Any], Any], updates: torch.Tensor) -> torch.Tensor:
    """Return the rate from an op that calls a function on the host, with the number of updates as an integer."""
    found: torch.Tensor = OP(updates, _name_of(function))
    return found


@contextmanager
def counted_on_host(counts: Counts | None) -> Iterator[None]:
    """Read numbers of updates from `counts`, and add numbers read from a device. None reads the device every time."""
    token = _counts.set(counts)
    try:
        yield
    finally:
        _counts.reset(token)


def _name_of(function: Callable[[Any], Any]) -> str:
    """Return a name that is the same on every rank: the qualified name of the function and a number for duplicates."""
    if id(function) not in _names:
        base = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
        number = sum(name.rpartition("#")[0] == base for name in _functions)
        _names[id(function)] = f"{base}#{number}"
        _functions[_names[id(function)]] = function  # keep a reference, so that no other function gets its id
    return _names[id(function)]


def _kernel(updates: torch.Tensor, name: str) -> torch.Tensor:
    if in_main_memory(updates):
        rates = [_rate(name, round(count)) for count in updates.reshape(-1).tolist()]
        return torch.tensor(rates, dtype=torch.float64, device=updates.device).reshape(updates.shape)
    if is_recording():
        return _filled(updates, name)
    counts = _counts.get()
    if counts is None or updates.ndim:
        counts = {}
    if name not in counts:
        counts[name] = _read(updates)
    known = counts[name]
    rate = torch.full_like(updates, _rate(name, known), dtype=torch.float64)
    return torch.where(updates == known, rate, torch.nan)


def _filled(updates: torch.Tensor, name: str) -> torch.Tensor:
    """Return the rate from tensors that the host fills before each launch of recorded kernels."""
    known, rate = torch.empty_like(updates), torch.empty_like(updates, dtype=torch.float64)

    def fill() -> bool:
        counts = _counts.get()
        if not counts or name not in counts:
            return False
        known.fill_(counts[name])
        rate.fill_(_rate(name, counts[name]))
        return True

    before_launches(fill)
    return torch.where(updates == known, rate, torch.nan)


def _read(updates: torch.Tensor) -> int:
    return round(updates.item())


def _rate(name: str, updates: int) -> float:
    rate = _functions[name](updates)
    is_scalar = isinstance(rate, torch.Tensor) and rate.numel() == 1
    if not is_scalar and not isinstance(rate, Real):
        raise TypeError(
            f"the learning-rate function {name.rpartition('#')[0]} returned {rate!r} for update {updates}: it returns "
            "a number"
        )
    return float(rate)


OP = define_op(
    "rate_on_host(Tensor updates, str name) -> Tensor",
    _kernel,
    lambda updates, name: torch.empty_like(updates, dtype=torch.float64),
    lambda updates, name: torch.ops.fp.rate_on_host(updates.detach(), name),
    torch.Tag.pointwise,
)
torch.library.register_vmap(OP, lambda info, in_dims, updates, name: (OP(updates, name), in_dims[0]))
