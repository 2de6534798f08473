"""Spec trees beside value trees: prefixes, and paths for messages."""

from __future__ import annotations

from typing import Any

import optree

from .spec import P, SpecError, as_spec

__all__ = ["broadcast_specs", "is_spec", "path_text", "tree_paths"]


def is_spec(x: Any) -> bool:
    """Whether something is a leaf of a spec tree: a spec, its string form, or None."""
    return x is None or isinstance(x, (P, str))


def path_text(path: tuple[Any, ...]) -> str:
    """A pytree path as text: keys and indices joined by '/'.

    >>> path_text(("layers", 0, "w1"))
    'layers/0/w1'
    """
    return "/".join(str(part) for part in path)


def tree_paths(tree: Any) -> list[str]:
    """The paths of a tree's leaves as text, in optree's order.

    >>> tree_paths({"b": [1, 2], "a": 3})
    ['a', 'b/0', 'b/1']

    Args:
        tree: any optree pytree.
    """
    return [path_text(path) for path in optree.tree_paths(tree)]


def broadcast_specs(specs: Any, tree: Any) -> Any:
    """A spec for every leaf of a tree, from a tree of specs that may be a prefix of it.

    >>> broadcast_specs({"a": P("data"), "b": None}, {"a": [1, 2], "b": 3})
    {'a': [P('data'), P('data')], 'b': P()}

    Args:
        specs: one spec for the whole tree, or a pytree whose leaves are specs for subtrees.
        tree: any optree pytree.

    Raises:
        SpecError: when the specs are not a prefix of the tree, naming where they differ.
    """
    if is_spec(specs):
        spec = as_spec(specs)
        return optree.tree_map(lambda _: spec, tree)
    leaves, structure = optree.tree_flatten(specs, is_leaf=is_spec)
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as error:
        differences = [
            f"  {_on_one_line(found('the spec tree'))}" for found in optree.prefix_errors(specs, tree, is_leaf=is_spec)
        ]
        raise SpecError(
            "the spec tree is no prefix of the tree it is for:\n" + "\n".join(differences or [str(error)])
        ) from None
    found = [as_spec(leaf) for leaf in leaves]  # refuses what is no spec
    return structure.unflatten([broadcast_specs(spec, sub) for spec, sub in zip(found, subtrees, strict=True)])


def _on_one_line(error: ValueError) -> str:
    return " ".join(str(error).removeprefix("pytree structure error: ").split())
