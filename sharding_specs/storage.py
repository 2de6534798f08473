"""Storage of shards at rest, a further field of a spec: `P("data", memory="host")`.

A rank keeps its shard of such a value in another form or another memory, by two functions of a shard. Ops and
collectives take fetched shards, so a program fetches its arguments first and stores its results last. A storage that is
`inside` programs, such as a memory, stays there until the layout changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from .errors import SpecError


class Storage(NamedTuple):
    store: Callable[[torch.Tensor], torch.Tensor]
    fetch: Callable[[torch.Tensor], torch.Tensor]
    inside: str  # the word of the shards inside programs; empty if they fetch them


_STORAGES: dict[tuple[str, str], Storage] = {}


def register_storage(
    field: str,
    word: str,
    store: Callable[[torch.Tensor], torch.Tensor],
    fetch: Callable[[torch.Tensor], torch.Tensor],
    *,
    inside: str = "",
) -> None:
    """Register how a rank keeps its shard of a value with the spec `P(…, field=word)`.

    >>> import torch
    >>> from sharding_specs import Mesh, P, shard, unshard
    >>> register_storage("form", "negative", torch.neg, torch.neg)
    >>> parts = [shard(torch.arange(4), P("data", form="negative"), Mesh(data=2), rank) for rank in (0, 1)]
    >>> parts, unshard(parts, P("data", form="negative"), Mesh(data=2))
    ([tensor([ 0, -1]), tensor([-2, -3])], tensor([0, 1, 2, 3]))

    Args:
        field: the name of the field of specs.
        word: the value of the field.
        store: returns the stored shard of a shard, with its shape and dtype. It is differentiable, and a trace can
            record it, as one or more ops.
        fetch: the inverse of `store`.
        inside: the word of shards inside programs. `word` if they take and return stored shards, which a change of
            layout fetches; by default, programs fetch shards.
    """
    _STORAGES[field, word] = Storage(store, fetch, inside)


def storages_of(storage: Mapping[str, str], where: object) -> list[Storage]:
    """Return the registered storages of the fields of a spec, in the order of storing a shard."""
    unknown = [f"{field}={word!r}" for field, word in storage.items() if (field, str(word)) not in _STORAGES]
    if unknown:
        known = ", ".join(f"{field}={word!r}" for field, word in _STORAGES) or "none"
        raise SpecError(
            f"{where!r}: no storage is registered as {', '.join(unknown)} (registered: {known}). Import the module "
            "that registers it, or call sharding_specs.register_storage(field, word, store, fetch). Other fields are "
            "unreduced=, reduced=, owner= and padded="
        )
    return [_STORAGES[each] for each in storage.items()]
