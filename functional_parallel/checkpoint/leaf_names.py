"""Names of the leaves of a tree in the files of a checkpoint, and trees of containers as JSON."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any

import optree

from ..functions import PyTree

_NUMBER = re.compile(r"-?\d+")
_TREES: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}


def tree_keys(tree: PyTree) -> list[str]:
    """Return a name for each leaf, different for any two leaves of any tree: its path, with typed segments.

    >>> tree_keys({"a": {"b": 1}, "a/b": 2, "c": [3], "d": {"0": 4}})
    ['a/b', 'a~1b', 'c/0', 'd/~20']

    '/' in a key is written '~1' and '~' is written '~0'. A key that is text of an integer begins with '~2'. The leaf of
    a tree without containers is '~'.
    """
    return ["/".join(map(_part, accessor)) or "~" for accessor in optree.tree_accessors(tree)]


def _part(entry: Any) -> str:
    key = getattr(entry, "field", None) or entry.entry
    if not isinstance(key, str):
        return str(key) if type(key) is int else f"~3{_escaped(repr(key))}"
    return f"~2{key}" if _NUMBER.fullmatch(key) else _escaped(key)


def _escaped(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def tree_to_json(tree: PyTree, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts with text as keys, lists, tuples and None as JSON; None if it has other containers."""
    try:
        return _to_json(tree, leaf)
    except TypeError:
        return None


def _to_json(tree: PyTree, leaf: Callable[[Any], Any]) -> Any:
    if tree is None:
        return {"None": 0}
    for name, kind in _TREES.items():
        if type(tree) is kind:
            if issubclass(kind, dict):
                if not all(isinstance(key, str) for key in tree):
                    raise TypeError("a key is not text")
                return {name: {key: _to_json(each, leaf) for key, each in tree.items()}}
            return {name: [_to_json(each, leaf) for each in tree]}
    if not optree.tree_is_leaf(tree):
        raise TypeError(f"{type(tree).__name__} is another container")
    return {"leaf": leaf(tree)}


def tree_from_json(made: Mapping[str, Any], leaf: Callable[[Any], Any], left_out: Container[Any] = ()) -> PyTree:
    """Return the tree, without the leaves that are left out: dicts lack them, and other containers have None."""
    ((name, value),) = made.items()
    if name == "leaf":
        return None if value in left_out else leaf(value)
    if name == "None":
        return None
    kind = _TREES[name]
    if issubclass(kind, dict):
        kept = ((key, each) for key, each in value.items() if "leaf" not in each or each["leaf"] not in left_out)
        return kind((key, tree_from_json(each, leaf, left_out)) for key, each in kept)
    return kind(tree_from_json(each, leaf, left_out) for each in value)
