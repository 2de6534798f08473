"""Rules that assign specs by path: patterns → specs, the first match wins.

A pattern is a glob over a leaf's path. `/` and `.` are equivalent separators, for dotted names of modules and pytree
paths. `*` crosses separators. A leading `*/` also matches at the top level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

import optree

from ..errors import SpecError
from ..pytree import Tree
from ..spec import P, as_spec
from ..trees import tree_paths

Rules = Mapping[str, P | str | None] | Iterable[tuple[str, P | str | None]]


class optional(str):
    """Pattern that may match no leaf. Rules for several models contain parameters that some of them do not have.

    >>> match_rules({"*/weight": P("tensor"), optional("*/bias"): P("tensor")}, {"head": {"weight": 0}}).unused
    []
    """

    __slots__ = ()


class RuleMatch(NamedTuple):
    """Specs of all leaves, paths of leaves without a match, and patterns, not optional, without a match."""

    specs: Any
    unmatched: list[str]
    unused: list[str]


def match_rules(rules: Rules, tree: Tree, *, default: P | None = None) -> RuleMatch:
    """Find a spec for every leaf of a tree by its path.

    >>> match_rules({"*/w1": P(None, "tensor"), "head": P()}, {"layers": [{"w1": 0, "b1": 0}]})
    RuleMatch(specs={'layers': [{'w1': P(None, 'tensor'), 'b1': P()}]}, unmatched=['layers/0/b1'], unused=['head'])

    Args:
        rules: patterns → specs (or their string forms), in order. The first pattern that matches a leaf wins.
        tree: any pytree.
        default: spec of leaves without a match; replicated by default.
    """
    pairs = [(pattern, as_spec(spec)) for pattern, spec in (rules.items() if isinstance(rules, Mapping) else rules)]
    used, unmatched, specs = set(), [], []
    for path in tree_paths(tree):
        found = next(((pattern, spec) for pattern, spec in pairs if matches(pattern, path)), None)
        if found is None:
            unmatched.append(path)
            specs.append(default if default is not None else P())
        else:
            used.add(found[0])
            specs.append(found[1])
    unused = [pattern for pattern, _ in pairs if pattern not in used and not isinstance(pattern, optional)]
    return RuleMatch(optree.tree_unflatten(optree.tree_structure(tree), specs), unmatched, unused)


def apply_rules(rules: Rules, tree: Tree, *, strict: bool = False, default: P | None = None) -> Any:
    """Return only the specs of `match_rules`.

    >>> apply_rules([("*/w", "embed heads/tensor"), ("*", None)], {"a": {"w": 0, "b": 0}}, strict=True)
    {'a': {'w': P(None, 'tensor'), 'b': P()}}

    Args:
        rules, tree, default: as for `match_rules`.
        strict: raise for leaves without a match, and for patterns without a match that are not optional.

    Raises:
        SpecError: in strict mode. The message lists all of them.
    """
    match = match_rules(rules, tree, default=default)
    if strict and (match.unmatched or match.unused):
        lines = [f"  no pattern matches {path}" for path in match.unmatched]
        lines += [
            f"  pattern {pattern!r} finds no leaf (an earlier one may take its leaves)" for pattern in match.unused
        ]
        if match.unmatched:
            lines.append("end the rules with ('*', P()) to replicate the rest")
        raise SpecError("rules do not fit the tree:\n" + "\n".join(lines))
    return match.specs


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    pattern = pattern.replace(".", "/")
    alternatives = [translate(pattern)]
    if pattern.startswith("*/"):
        alternatives.append(translate(pattern[2:]))
    return re.compile("|".join(alternatives))


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the path of a leaf. The separators `.` and `/` are equivalent.

    >>> matches("*/bias", "layers.0.bias"), matches("*/bias", "bias"), matches("bias", "layers/0/bias")
    (True, True, False)
    """
    return _expression(pattern).match(path.replace(".", "/")) is not None


_RANGE = re.compile(r"(?<![^/.])(\d+)-(\d+)(?![^/.])")
_PART = re.compile(r"[^/.]+")


def matches_within(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the path of a leaf, or that of a node around it. `0-3` is any of these numbers.

    >>> [matches_within("layers/0-3", path) for path in ("layers.2.w", "layers.2", "layers.4.w", "layers")]
    [True, True, False, False]
    """
    found = _RANGE.search(pattern)
    if found is not None:
        numbers = range(int(found[1]), int(found[2]) + 1)
        return any(matches_within(f"{pattern[: found.start()]}{n}{pattern[found.end() :]}", path) for n in numbers)
    return any(matches(pattern, around) for around in prefixes([path]))


def prefixes(paths: Iterable[str]) -> list[str]:
    """Return all paths and the paths of the nodes around them.

    >>> prefixes(["layers.0.w", "layers.0.b"])
    ['layers', 'layers.0', 'layers.0.w', 'layers.0.b']
    """
    return list(dict.fromkeys(path[: part.end()] for path in paths for part in _PART.finditer(path)))


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known paths or names that are most similar to a name or pattern, for messages.

    >>> nearest("*nrom*", ["head/w", "layers/0/norm/w", "layers/0/w1"], most=1)
    ['layers/0/norm/w']
    """
    bare = name.replace(".", "/").strip("*/")

    def likeness(path: str) -> float:
        return max(SequenceMatcher(None, bare, part).ratio() for part in (path, *path.replace(".", "/").split("/")))

    return sorted(known, key=likeness, reverse=True)[:most]
