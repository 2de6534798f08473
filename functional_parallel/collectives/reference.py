"""What each primitive does to a whole group: pure functions from the list of all ranks' values to the list of results.

This is the meaning of the collectives, with no process, mesh or type in sight: the list is in rank order along the axes
(the first axis major), and entry i of the result is what rank i holds afterwards. Simulated ranks and vmap levels run
these functions; real processes are tested against them.

They are written in differentiable ops, never in place. Sums go in rank order, one after the other, so that every
interpreter which uses them adds in the same order, bit for bit. A result that is the same on all ranks is one tensor,
n times in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "all_gather",
    "all_to_all",
    "apply_reference",
    "axis_index",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmin",
    "ppermute",
    "pscatter",
    "psum",
    "psum_scatter",
]

Values = Sequence[Tensor]


def apply_reference(operation: str, values: Values, *params: Any) -> list[Tensor]:
    """Perform the primitive of a given name, with the arguments of its library op after `axes`.

    >>> perform("psum", [torch.tensor(1), torch.tensor(2)], "varying")
    [tensor(3), tensor(3)]

    Args:
        operation: the name of an op in `torch.ops.fp`.
        values: every rank's operand.
        params: dims, pairs or source; states (strings) are ignored, since they do not change values.
    """
    return _OPERATIONS[operation](values, *(param for param in params if not isinstance(param, str)))


def psum(values: Values, reduce_dtype: torch.dtype | None = None) -> list[Tensor]:
    """The sum, everywhere; accumulated in `reduce_dtype` when one is given."""
    return [_sum(values, reduce_dtype)] * len(values)


def psum_scatter(values: Values, dim: int, reduce_dtype: torch.dtype | None = None) -> list[Tensor]:
    """Chunk i of the sum on rank i."""
    return list(_sum(values, reduce_dtype).chunk(len(values), dim))


def all_gather(values: Values, dim: int) -> list[Tensor]:
    """All values, concatenated, everywhere."""
    return [torch.cat(tuple(values), dim)] * len(values)


def pscatter(values: Values, dim: int) -> list[Tensor]:
    """Chunk i of its own value on rank i."""
    return [value.chunk(len(values), dim)[rank] for rank, value in enumerate(values)]


def all_to_all(values: Values, split_dim: int, concat_dim: int) -> list[Tensor]:
    """Chunk i of every value, concatenated in rank order, on rank i."""
    chunks = [value.chunk(len(values), split_dim) for value in values]
    return [torch.cat(received, concat_dim) for received in zip(*chunks, strict=True)]


def ppermute(values: Values, pairs: Sequence[int]) -> list[Tensor]:
    """The value of the rank that sends here, or zeros. Pairs are source, target, source, target, ..."""
    senders = dict(zip(pairs[1::2], pairs[0::2], strict=True))
    return [values[senders[rank]] if rank in senders else torch.zeros_like(value) for rank, value in enumerate(values)]


def pmax(values: Values) -> list[Tensor]:
    """The elementwise largest, everywhere."""
    return [reduce(torch.maximum, values)] * len(values)


def pmin(values: Values) -> list[Tensor]:
    """The elementwise smallest, everywhere."""
    return [reduce(torch.minimum, values)] * len(values)


def pbroadcast(values: Values, source: int) -> list[Tensor]:
    """The value of rank `source`, everywhere."""
    return [values[source]] * len(values)


def pcast(values: Values) -> list[Tensor]:
    """Every rank keeps what it has."""
    return list(values)


def axis_index(size: int) -> list[Tensor]:
    """The index of each rank."""
    return list(torch.arange(size).unbind())


def _sum(values: Values, reduce_dtype: torch.dtype | None) -> Tensor:
    if reduce_dtype is None:
        return reduce(torch.add, values)
    return reduce(torch.add, (value.to(reduce_dtype) for value in values)).to(values[0].dtype)


_OPERATIONS: dict[str, Callable[..., list[Tensor]]] = {
    "psum": psum,
    "psum_scatter": psum_scatter,
    "all_gather": all_gather,
    "pscatter": pscatter,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
    "pmax": pmax,
    "pmin": pmin,
    "pbroadcast": pbroadcast,
    "pcast": pcast,
}
