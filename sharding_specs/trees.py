"""Spec trees for value trees: broadcast of prefixes, and paths for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import optree

from .dataclass_nodes import register_dataclasses
from .errors import SpecError
from .pytree import SpecTree, Tree
from .spec import P, as_spec


def is_spec(x: Tree) -> TypeGuard[P | str | None]:
    return x is None or isinstance(x, (P, str))


def path_text(path: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in path)


def tree_paths(tree: Tree) -> list[str]:
    """Return the paths of a tree's leaves as text, in optree's order.

    >>> tree_paths({"b": [1, 2], "a": 3})
    ['a', 'b/0', 'b/1']

    Args:
        tree: any optree pytree.
    """
    register_dataclasses(tree)
    return [path_text(path) for path in optree.tree_paths(tree)]


def broadcast_specs(
    specs: SpecTree, tree: Tree, *, name: str = "the spec tree", what: str = "the tree it is for"
) -> Any:
    """Expand a tree of specs, which may be a prefix of `tree`, to one spec per leaf.

    >>> broadcast_specs({"a": P("data"), "b": None}, {"a": [1, 2], "b": 3})
    {'a': [P('data'), P('data')], 'b': P()}

    Args:
        specs: one spec for the entire tree, or a pytree with one spec per subtree.
        tree: any optree pytree.
        name, what: names of specs and tree in messages.

    Raises:
        SpecError: when the specs are not a prefix of the tree. The message lists the differences.
    """
    register_dataclasses(tree, specs)
    if is_spec(specs):
        spec = as_spec(specs)
        return optree.tree_map(lambda _: spec, tree)
    leaves, structure = optree.tree_flatten(specs, is_leaf=is_spec)
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as error:
        found = _differences(specs, tree, ()) or [" ".join(str(error).split())]
        more = [f"  and {len(found) - _MOST} more"] if len(found) > _MOST else []
        lines = [*(f"  {each}" for each in found[:_MOST]), *more, f"  {_ways_to_write(tree)}"]
        raise SpecError("\n".join([f"{name}: not of the structure of {what}:", *lines])) from None
    full = [as_spec(leaf) for leaf in leaves]  # raises for leaves that are not specs
    return structure.unflatten([optree.tree_map(lambda _, a=a: a, b) for a, b in zip(full, subtrees, strict=True)])


# --- Messages for specs that are not a prefix ---

_MOST = 8  # lines of a message
_LONGEST = 100  # characters of an example


def _differences(specs: SpecTree, tree: Tree, path: tuple[Any, ...]) -> list[str]:
    if is_spec(specs) or optree.tree_is_leaf(specs):
        return []
    ours, theirs = _children(specs), _children(tree)
    alone: list[str] = []
    if isinstance(specs, Mapping) and isinstance(tree, Mapping):
        alone += [f"{path_text((*path, key))}: there is no spec for it" for key in theirs if key not in ours]
        alone += [f"{path_text((*path, key))}: the tree has no such node" for key in ours if key not in theirs]
    elif type(specs) is not type(tree) or len(ours) != len(theirs):
        return [f"{path_text(path) or 'the entire tree'}: {_kind(tree)}, but the specs have {_kind(specs)}"]
    both = (key for key in ours if key in theirs)
    return alone + [line for key in both for line in _differences(ours[key], theirs[key], (*path, key))]


def _children(tree: Tree) -> dict[Any, Any]:
    if optree.tree_is_leaf(tree):
        return {}
    structure = optree.tree_structure(tree, is_leaf=lambda x: x is not tree)
    return dict(zip(structure.entries(), optree.tree_leaves(tree, is_leaf=lambda x: x is not tree), strict=True))


def _kind(node: Tree) -> str:
    shape = getattr(node, "shape", None)
    if shape is not None:
        return f"a tensor of shape {tuple(shape)}"
    if optree.tree_is_leaf(node, none_is_leaf=True):
        return repr(node)
    article = "an" if type(node).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(node).__name__} of {len(_children(node))}"


class _AnySpec:
    def __repr__(self) -> str:
        return "P(…)"


def _ways_to_write(tree: Tree) -> str:
    each = repr(optree.tree_map(lambda _: _AnySpec(), tree, is_leaf=lambda x: x is not tree))
    example = f", {each} has one per child" if 4 < len(each) <= _LONGEST else ""
    return f"a spec applies to all leaves below it: P(…) alone is for the entire tree{example}"
