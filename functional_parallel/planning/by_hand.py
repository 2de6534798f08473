"""Layers placed in memories by hand: patterns of paths → memories, the first match wins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from sharding_specs import SpecError
from sharding_specs.rules import matches, nearest

from .model_blocks import Block, ModelLeaf, prefixes

MemoryName: TypeAlias = str | int  # "device", "host" or "disk", or the number of a device
OFFLOADED = ("host", "disk")
_RANGE = re.compile(r"(?<![^/.])(\d+)-(\d+)(?![^/.])")


def placed_by_hand(root: Block, places: Mapping[str, MemoryName]) -> dict[ModelLeaf, MemoryName]:
    """Return the memory of each leaf of a model.

    Args:
        root: the model.
        places: memories by pattern. A pattern matches the path of a leaf or of a block around it; `0-3` in a pattern
            is any of these numbers.
    """
    paths = [name for leaf in root.leaves for name in leaf.names]
    blocks, problems = prefixes(paths), list[str]()
    matched = {pattern: {path for path in blocks if _matches(pattern, path)} for pattern in places}
    for pattern, memory in places.items():
        if memory not in ("device", *OFFLOADED) and (not isinstance(memory, int) or memory < 0):
            problems.append(f"{pattern!r}: {memory!r} is no memory: 'device', 'host', 'disk' or a device's number")
        if not matched[pattern]:
            problems.append(
                f"pattern {pattern!r} matches nothing; the nearest are {', '.join(nearest(pattern, blocks))}"
            )
    found = {name: next((p for p in places if matched[p].intersection(prefixes([name]))), None) for name in paths}
    missing = list(dict.fromkeys(name for name in paths if found[name] is None))
    problems += [f"no pattern matches {name}" for name in missing[:8]]
    problems += [f"and {len(missing) - 8} more" for _ in missing[8:9]]
    problems += ["end the patterns with '*' for the rest" for _ in missing[:1]]
    for leaf in dict.fromkeys(root.leaves) if not problems else ():
        for name, other in itertools.pairwise(leaf.names):
            first, second = (places[found[each] or ""] for each in (name, other))
            if first != second:
                problems.append(f"{name} in {first!r} and {other} in {second!r} are one tied weight: place them alike")
    if problems:
        raise SpecError("\n  ".join(["fp.device_map: the patterns do not fit the model:", *problems]))
    return {leaf: places[found[leaf.names[0]] or ""] for leaf in root.leaves}


def _matches(pattern: str, path: str) -> bool:
    return any(matches(each, path) for each in _without_ranges(pattern))


def _without_ranges(pattern: str) -> Iterable[str]:
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    numbers = range(int(found[1]), int(found[2]) + 1)
    ends = list(_without_ranges(pattern[found.end() :]))
    return [f"{pattern[: found.start()]}{number}{end}" for number in numbers for end in ends]
