"""String form of a spec: an einops pattern with an optional `/axis` after a factor, and `2+1+1` for unequal blocks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from einops.parsing import AnonymousAxis, ParsedExpression

from .blocks import Blocks, blocks_of

_SIZES = re.compile(r"(?<![\w+])\d+(?:\+\d+)+(?![\w+])")  # of unequal blocks
_SHARDED = re.compile(r"([A-Za-z0-9_]+)/(\(([^()]*)\)|[A-Za-z_][A-Za-z0-9_]*)")


def parse_dims(text: str, sizes: Mapping[str, Blocks]) -> list[tuple[str | Blocks, ...]]:
    """Return, per dim of a spec string, its sharded factors and the sizes of the factors outside them.

    >>> parse_dims("embed (3 heads/tensor dim)", {})
    [(), (3, 'tensor')]
    """
    axes: dict[str, tuple[str, ...]] = {}
    sums: dict[str, Blocks] = {}
    prefix = next(each for each in ("blocks" * count for count in itertools.count(1)) if each not in text)

    def name_of(match: re.Match[str]) -> str:
        name = f"{prefix}{len(sums)}"
        sums[name] = blocks_of([int(size) for size in match.group().split("+")])
        return name

    def take(match: re.Match[str]) -> str:
        name, target, several = match.group(1), match.group(2), match.group(3)
        if name in sums:
            raise ValueError(
                f"spec {text!r}: blocks are around a factor that an axis splits; write (2+1 name/{target})"
            )
        named = tuple(part.strip() for part in several.split(",")) if several is not None else (target,)
        if not all(axis.isidentifier() for axis in named):
            raise ValueError(f"spec {text!r}: {match.group(0)!r} does not read; write name/axis or name/(axis,axis)")
        axes[name] = named
        return name

    plain = _SHARDED.sub(take, _SIZES.sub(name_of, text))
    sizes = {**sizes, **sums}
    if "/" in plain:
        raise ValueError(f"spec {text!r}: a '/' must be between a dim's name and a mesh axis, 'vocab/tensor'")
    try:
        parsed = ParsedExpression(plain, allow_underscore=True, allow_duplicates=False)
    except Exception as error:
        raise ValueError(f"spec {text!r} is not an einops pattern: {error}") from None
    return [_factors(list(dim), axes, sizes, text) for dim in _without_leading_ellipsis(parsed.composition, axes, text)]


def _without_leading_ellipsis(composition: Sequence[Any], axes: Mapping[str, object], text: str) -> list[list[str]]:
    dims: list[list[str]] = []
    for position, dim in enumerate(composition):
        if not isinstance(dim, str):
            dims.append([_name(factor) for factor in dim])
            continue
        rest = [_name(name) for later in composition[position + 1 :] for name in later]
        if any(name in axes for name in rest):
            raise ValueError(f"spec {text!r}: dims after '...' have no known position, so name every dim to shard one")
        break
    return dims


def _name(factor: str | AnonymousAxis) -> str:
    return str(getattr(factor, "value", factor))


def _factors(
    names: list[str], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, Blocks], text: str
) -> tuple[str | Blocks, ...]:
    last = max((index for index, name in enumerate(names) if name in axes), default=-1)
    found: list[str | Blocks] = []
    for index, name in enumerate(names[: last + 1]):
        if name in axes:
            found.extend(axes[name])
            if index < last:
                raise ValueError(
                    f"spec {text!r}: {name!r} is sharded by {', '.join(axes[name])} and so is a factor inside it in "
                    "the same dim; give both axes to one factor, 'name/(outer,inner)'"
                )
        else:
            found.append(_size(name, sizes, text))
    return tuple(found)


def _size(name: str, sizes: Mapping[str, Blocks], text: str) -> Blocks:
    if name.isdigit():
        return int(name)
    if name not in sizes:
        raise ValueError(
            f"spec {text!r}: the factor {name!r} is outside a sharded factor, so its size is needed; "
            f"write the number instead, or P.parse(text, {name}=…)"
        )
    return sizes[name]
