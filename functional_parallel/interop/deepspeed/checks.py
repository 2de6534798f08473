"""Reader of ds_config.json with its comments and trailing commas, and checks that report all problems together."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sharding_specs.rules import nearest

from ...quantities import is_non_negative
from .schema import KEYS, Key

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')
_SAVES = "zero_optimization.stage3_gather_{}_weights_on_model_save"
_RENAMED = {"bfloat16": "bf16", _SAVES.format("fp16"): _SAVES.format("16bit")}
_PARENTS = {path.rpartition(".")[0] for path in KEYS} | {"optimizer", "scheduler"}


def _is_integer(least: float, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_KINDS: dict[str | tuple[str, ...], tuple[str, Callable[[Any], bool]]] = {  # description and test
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer of at least 0", partial(_is_integer, 0)),
    "count": ("an integer of at least 1", partial(_is_integer, 1)),
    "integer": ("an integer", partial(_is_integer, -math.inf)),
    "number": ("a finite number of at least 0", is_non_negative),
    "list": ("a list", lambda value: isinstance(value, (list, tuple))),
    "text": ("a string", lambda value: isinstance(value, str)),
    "block": ("an object", lambda value: isinstance(value, Mapping)),
}


class Problems(list[str]):
    def add(self, path: str, reason: str) -> None:
        self.append(f"{path}: {reason}")

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Add a ValueError that the body raises."""
        try:
            yield
        except ValueError as error:
            self.add(path, str(error))

    def raise_if_any(self) -> None:
        if self:
            raise ValueError("this DeepSpeed configuration is not accepted:\n  " + "\n  ".join(self))


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    text = Path(source).read_text()
    try:
        found = json.loads(_LAST_COMMA.sub(_string, _COMMENT.sub(_string, text)), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = [*text.splitlines(), "", ""][error.lineno - 1].strip()
        raise ValueError(f"{source}, line {error.lineno}: {error.msg}: {line!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{source}: a configuration is a JSON object, not {type(found).__name__}")
    return found


def _string(match: re.Match[str]) -> str:
    """Return a string as it is. A comment leaves its line breaks, so that errors name the right line."""
    return match[1] or "\n" * match[0].count("\n")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {', '.join(twice)}")
    return dict(pairs)


def flat(config: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the values by path, under their present names."""
    found: dict[str, Any] = {}
    for path, value in _leaves(config, "", problems):
        block, _, last = path.rpartition(".")
        longer = f"{block}.stage3_{last}"
        name = longer if path not in KEYS and longer in KEYS else path
        if name not in KEYS:
            problems.add(path, f"unknown key; the nearest is {nearest(path, KEYS, most=1)[0]}")
        elif name in found:
            problems.add(path, f"{name} is given twice, under two of its names")
        else:
            found[name] = value
    return found


def _leaves(config: Mapping[str, Any], prefix: str, problems: Problems) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        path = _RENAMED.get(f"{prefix}{name}", f"{prefix}{name}")
        if path == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        if path not in _PARENTS:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.", problems)
        elif value is not None:
            problems.add(path, f"it is an object, not {value!r}")


def converted(given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    found = {}
    for path, value in given.items():
        key = KEYS[path]
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer() and key.kind in ("int", "count", "integer"):
            value = int(value)
        words, is_legal = _KINDS.get(key.kind) or (" or ".join(map(repr, key.kind)), key.kind.__contains__)
        if not is_legal(value):
            problems.add(path, f"it is {words}, not {value!r}")
        elif key.treatment == "refused" and not _is_harmless(value, key):
            problems.add(path, f"{value!r} is refused: {key.text}")
        else:
            found[path] = value
    return found


def _is_harmless(value: Any, key: Key) -> bool:
    if key.kind in ("block", "list"):
        return not value or (isinstance(value, Mapping) and not value.get("enabled", any(value.values())))
    return bool(value == key.default)
