"""Buffers of a module as an argument of a function: every rank holds them in full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree


class BufferTree(dict[str, Any]):
    """Buffers by name. As the second argument of a function they are no part of the batch, so no axis splits them."""


def _flatten(buffers: BufferTree) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
    names = tuple(sorted(buffers))
    return tuple(buffers[name] for name in names), names, names


def _made(names: tuple[str, ...], values: Iterable[Any]) -> BufferTree:
    return BufferTree(zip(names, values, strict=True))


optree.register_pytree_node(
    BufferTree,
    _flatten,
    _made,
    path_entry_type=optree.MappingEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
