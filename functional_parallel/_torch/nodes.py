"""Nodes of a graph, made without the checks of torch that a traced program does not need."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import fx


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """Add a node at the insertion point of a graph, with the name that torch would give it, or one like `name`."""
    # `graph.call_function` also searches all arguments for symbolic sizes, and its record of names keeps erased nodes.
    name = _new_name(graph, target) if name is None else graph._graph_namespace.create_name(name, None)
    node = fx.Node(graph, name, "call_function", target, args, dict(kwargs or {}))
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def _new_name(graph: fx.Graph, target: Callable[..., Any]) -> str:
    base, names = _base_name(target.__name__), graph._graph_namespace
    if base is None:
        return str(names.create_name(graph._target_to_str(target), None))
    number, name = names._base_count.get(base, 0), base
    while name in names._used_names:
        number += 1
        name = f"{base}_{number}"
    names._used_names.add(name)
    names._base_count[base] = number
    return name


@lru_cache(maxsize=4096)
def _base_name(function: str) -> str | None:
    """Return the name of the first call of a function. None if it has a number, which torch continues to count."""
    graph = fx.Graph()
    name = graph._graph_namespace.create_name(graph._target_to_str(function), None)
    return None if re.search(r"_\d+$", name) or function.startswith("__") else name
