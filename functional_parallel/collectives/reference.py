"""Reference semantics of the primitives: pure functions from the list of all ranks' values to the list of results.

Simulated ranks and vmap levels run these functions, and real processes are tested against them. Sums are accumulated in
rank order, so that all return the same bits. A result that is equal on all ranks is one tensor, n times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from .call import CollectiveCall

Values = Sequence[Tensor]


def apply_reference(call: CollectiveCall, values: Values) -> list[Tensor]:
    """Apply a primitive to the operand of every rank."""
    return _OPERATIONS[call.kind](values, **call.routing)


def psum(values: Values) -> list[Tensor]:
    return [reduce(torch.add, values)] * len(values)


def psum_scatter(values: Values, dim: int) -> list[Tensor]:
    return list(reduce(torch.add, values).chunk(len(values), dim))


def all_gather(values: Values, dim: int) -> list[Tensor]:
    return [torch.cat(tuple(values), dim)] * len(values)


def pscatter(values: Values, dim: int) -> list[Tensor]:
    return [value.chunk(len(values), dim)[rank] for rank, value in enumerate(values)]


def all_to_all(values: Values, split_dim: int, concat_dim: int) -> list[Tensor]:
    chunks = [value.chunk(len(values), split_dim) for value in values]
    return [torch.cat(received, concat_dim) for received in zip(*chunks, strict=True)]


def ppermute(values: Values, pairs: Sequence[int]) -> list[Tensor]:
    """Return, on each rank, the value of its source, or zeros. Pairs are source, target, source, target, ..."""
    senders = dict(zip(pairs[1::2], pairs[0::2], strict=True))
    return [values[senders[rank]] if rank in senders else torch.zeros_like(value) for rank, value in enumerate(values)]


def pmax(values: Values) -> list[Tensor]:
    return [reduce(torch.maximum, values)] * len(values)


def pmin(values: Values) -> list[Tensor]:
    return [reduce(torch.minimum, values)] * len(values)


def pbroadcast(values: Values, source: int) -> list[Tensor]:
    return [values[source]] * len(values)


def pcast(values: Values) -> list[Tensor]:
    return list(values)


_FUNCTIONS: tuple[Callable[..., list[Tensor]], ...] = (
    *(psum, psum_scatter, all_gather, pscatter, all_to_all),
    *(ppermute, pmax, pmin, pbroadcast, pcast),
)
_OPERATIONS: dict[str, Callable[..., list[Tensor]]] = {
    **{each.__name__: each for each in _FUNCTIONS},
    "broadcast": lambda values, owner: pbroadcast(values, owner),
    "scatter": lambda values, dim, owner: list(values[owner].chunk(len(values), dim)),
    "gather": lambda values, dim, owner: all_gather(values, dim),  # of which only the owner reads the result
    "reduce": lambda values, owner: psum(values),
}
