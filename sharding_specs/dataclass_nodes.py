"""Dataclasses and `UserDict`s as pytrees. optree learns of a class at the first tree that has an instance of it."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import UserDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeGuard, TypeVar
from weakref import WeakSet

import optree
import torch

from .annotated import Annotated
from .pytree import DataclassNode, Tree
from .spec import P

T = TypeVar("T")

_libraries = {"torch", "optree", "sharding_specs"}  # packages with dataclasses that are leaves
_CONTAINERS = (dict, list, tuple, set, frozenset, str)  # subclasses store more than their fields
_HELD = (torch.Tensor, P, Annotated)

_lock = threading.Lock()
_registered: WeakSet[type] = WeakSet()


def register_dataclasses(*trees: Any) -> None:
    """Register the dataclasses in some trees with optree, in its global namespace, if they hold tensors or specs.

    Their children are the fields, by name, in the order of declaration. A field that is not a tensor is also a leaf,
    like a number in a dict. The registration of a class that is already registered is not changed. A `UserDict`, such
    as a tokenizer's `BatchEncoding`, is registered too. Its children are its values, sorted by key. A new instance
    is constructed from a dict.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from sharding_specs import tree_paths
    >>> @dataclass
    ... class Params:
    ...     weight: torch.Tensor
    ...     bias: torch.Tensor
    >>> register_dataclasses(Params(torch.ones(2), torch.ones(1)))
    >>> tree_paths({"layer": Params(torch.ones(2), torch.ones(1))})
    ['layer/weight', 'layer/bias']

    Args:
        trees: any pytrees.
    """
    for leaf in optree.tree_leaves(trees):
        is_mapping = isinstance(leaf, UserDict)
        if is_mapping or (_is_instance(leaf) and _holds(leaf)):
            _register(type(leaf), is_mapping)
            register_dataclasses(leaf)  # its fields may contain more


def keep_as_leaves(library: str) -> None:
    """Make the dataclasses of a library leaves, not nodes, of a tree.

    >>> keep_as_leaves("my_library")

    Args:
        library: name of its package.
    """
    _libraries.add(library)


def _is_instance(leaf: Tree) -> TypeGuard[DataclassNode]:
    kind = type(leaf)
    if not hasattr(kind, "__dataclass_fields__") or isinstance(leaf, (torch.nn.Module, type, *_CONTAINERS)):
        return False
    return not _is_defined_in_a_library(kind)


def _is_defined_in_a_library(kind: type) -> bool:
    """Whether a module of a library defines the class. A class of a doctest in that module does not count."""
    is_inside = kind.__module__.split(".")[0] in _libraries
    return is_inside and hasattr(sys.modules.get(kind.__module__), kind.__qualname__.split(".")[0])


def _holds(leaf: DataclassNode) -> bool:
    inner = optree.tree_leaves(list(_content(leaf).values()))
    return any(isinstance(each, _HELD) or (_is_instance(each) and _holds(each)) for each in inner)


def _register(kind: type, is_mapping: bool) -> None:
    def from_items(keys: tuple[Any, ...], children: Iterable[Tree]) -> Any:
        return kind(dict(zip(keys, children, strict=True)))

    with _lock:
        if kind not in _registered:  # another thread may have registered it
            _registered.add(kind)
            optree.register_pytree_node(
                kind,
                _flatten_mapping if is_mapping else _flatten,
                from_items if is_mapping else lambda names, children: _made(kind, names, children),
                path_entry_type=optree.MappingEntry if is_mapping else optree.GetAttrEntry,
                namespace=optree.registry.__GLOBAL_NAMESPACE,
            )


def _flatten_mapping(instance: UserDict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    keys = tuple(sorted(instance, key=str))
    return tuple(instance[key] for key in keys), keys, keys


def _flatten(instance: DataclassNode) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
    content = _content(instance)
    return tuple(content.values()), tuple(content), tuple(content)


def _content(instance: DataclassNode) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(instance)]
    more = [
        name
        for name in getattr(instance, "__dict__", {})
        if name not in fields and not isinstance(getattr(type(instance), name, None), cached_property)
    ]
    return {name: getattr(instance, name) for name in (*fields, *more) if hasattr(instance, name)}


def _made(kind: type[T], names: tuple[str, ...], children: Iterable[Tree]) -> T:
    instance = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(instance, name, child)
    return instance
