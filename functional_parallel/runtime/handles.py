"""What runtimes hold in a tensor's place: it, a list with one per class of ranks, or who of a pipeline holds what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _torch
from ..ir import Aval

__all__ = ["PipelineValue", "copy_if_aliased", "runtime_kind_of", "storages"]


@dataclass(slots=True, eq=False)
class PipelineValue:
    """A value that some ranks of a pipeline hold.

    Attributes:
        parts: the ranks' parts, of those ranks that are in this process.
        holders: the ranks that hold it; None for all.
        aval: its shape and dtype on one rank.
    """

    parts: dict[int, Any]
    holders: frozenset[int] | None
    aval: Aval


def storages(*values: Any) -> set[int]:
    """Where tensors, and handles of several, lie in memory; of others, and inside a transform, nothing."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if not _torch.is_functorch_wrapped(value):
                found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, list):
            found |= storages(*value)
        elif isinstance(value, PipelineValue):
            found |= storages(*value.parts.values())
    return found


def runtime_kind_of(handle: Any) -> str:
    """Where a handle's parts are: with "simulated ranks", or "real processes".

    >>> who_holds([torch.ones(2), torch.zeros(2)])
    'simulated ranks'
    """
    part = next(iter(handle.parts.values()), None) if isinstance(handle, PipelineValue) else handle
    return "simulated ranks" if isinstance(part, list) else "real processes"


def copy_if_aliased(handle: Any, taken: set[int]) -> Any:
    """A handle in memory that nobody else has: copied where that is taken, and taken from now on.

    Ranks of a pipeline that hold the same still do.
    """
    if isinstance(handle, PipelineValue):
        made = {
            id(part): copy_if_aliased(part, taken)
            for part in {id(part): part for part in handle.parts.values()}.values()
        }
        return replace(handle, parts={rank: made[id(part)] for rank, part in handle.parts.items()})
    if isinstance(handle, list):
        return [copy_if_aliased(part, taken) for part in handle]
    if not isinstance(handle, torch.Tensor):
        return handle
    if not handle.is_contiguous() or storages(handle) & taken:
        handle = handle.clone(memory_format=torch.contiguous_format)
    taken |= storages(handle)
    return handle
