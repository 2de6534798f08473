"""Transforms as code and as keys of dicts. Both follow from the fields of a dataclass."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import optree

from sharding_specs import P

from ..requests import LossScale


class AsCode:
    """Base of frozen dataclasses that print as the call that makes them, and compare and hash by its arguments."""

    def __init_subclass__(cls) -> None:  # before `dataclass`, which leaves these as they are
        for name in ("__repr__", "__eq__", "__hash__"):
            setattr(cls, name, getattr(AsCode, name))

    def __repr__(self) -> str:
        return call_as_code(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and hashable(self) == hashable(other)

    def __hash__(self) -> int:
        return hash((type(self), hashable(self)))


def as_code(value: Any) -> str:
    """Return an argument of a transform as code, with `fp` and `P` in scope. A function is printed by its name."""
    if isinstance(value, (LossScale, AsCode)):
        return call_as_code(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {as_code(each)}' for key, each in value.items())}}}"
    if type(value) in (list, tuple):
        items = ", ".join(map(as_code, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    return getattr(value, "__name__", repr(value)) if callable(value) else repr(value)


def call_as_code(value: Any, only: Collection[str] | None = None) -> str:
    """Return the call that makes a dataclass, without arguments that have their defaults, or with `only` some."""
    parts: list[str] = []
    by_place = True
    for each in _arguments(value):
        given = getattr(value, each.name)
        by_place = by_place and not each.kw_only
        if _is_default(each, given) or (only is not None and each.name not in only):
            by_place = False
        else:
            parts.append(as_code(given) if by_place else f"{each.name}={as_code(given)}")
    return f"{'fp.' * _is_own(type(value))}{type(value).__name__}({', '.join(parts)})"


def hashable(value: Any) -> Any:
    """Return a key that is equal for equal arguments of transforms. The order of rules counts."""
    if isinstance(value, AsCode):
        return tuple((each.name, hashable(getattr(value, each.name))) for each in _arguments(value))
    if isinstance(value, Mapping):
        return tuple((key, hashable(each)) for key, each in value.items())
    leaves, tree = optree.tree_flatten(value, none_is_leaf=True)
    return value if tree.is_leaf() else (tree, *map(hashable, leaves))


def from_code(text: str) -> Any:
    """Return the object of a text of `as_code`. Only calls of transforms, their rules and `P` are read."""
    kinds: list[type[Any]] = [LossScale, *_subclasses(AsCode)]
    known = {f"{'fp.' * _is_own(each)}{each.__name__}": each for each in kinds}
    return _read(ast.parse(text, mode="eval").body, {"P": P, **known})


def _read(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in known:
        named = {each.arg: _read(each.value, known) for each in node.keywords if each.arg}
        return known[ast.unparse(node.func)](*(_read(each, known) for each in node.args), **named)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_read(each, known) for each in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        return {_read(key, known): _read(each, known) for key, each in zip(node.keys, node.values, strict=True) if key}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is no data, nor a transform whose class exists by now") from None


def _arguments(value: Any) -> Iterable[Field[Any]]:
    return (each for each in fields(value) if each.init)


def _is_default(each: Field[Any], given: Any) -> bool:
    default = each.default if each.default_factory is MISSING else each.default_factory()
    return default is not MISSING and bool(type(given) is type(default) and given == default)


def _is_own(kind: type[Any]) -> bool:
    return kind.__module__.startswith(f"{__name__.partition('.')[0]}.")


def _subclasses(base: type[Any]) -> Iterable[type[Any]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)
