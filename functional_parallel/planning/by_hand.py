"""Layers placed in memories by hand: patterns of paths → memories, the first match wins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

from sharding_specs import SpecError
from sharding_specs.rules import matches_within, nearest, prefixes

from .model_blocks import Block, ModelLeaf

MemoryName: TypeAlias = str | int  # "device", "host" or "disk", or the number of a device
OFFLOADED = ("host", "disk")


def placed_by_hand(root: Block, places: Mapping[str, MemoryName]) -> dict[ModelLeaf, MemoryName]:
    """Return the memory of each leaf of a model.

    Args:
        root: the model.
        places: memories by pattern. A pattern matches the path of a leaf or of a block around it; `0-3` in a pattern
            is any of these numbers.
    """
    paths = [name for leaf in root.leaves for name in leaf.names]
    problems = list[str]()
    found = {name: next((each for each in places if matches_within(each, name)), None) for name in paths}
    for pattern, memory in places.items():
        if memory not in ("device", *OFFLOADED) and (not isinstance(memory, int) or memory < 0):
            problems.append(f"{pattern!r}: {memory!r} is no memory: 'device', 'host', 'disk' or a device's number")
        if not any(matches_within(pattern, name) for name in paths):
            known = ", ".join(nearest(pattern, prefixes(paths)))
            problems.append(f"pattern {pattern!r} matches nothing; the nearest are {known}")
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
