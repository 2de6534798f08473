"""Checks of a configuration against the schema. All problems are reported in one error, each with its path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sharding_specs.rules import nearest

from ...quantities import is_non_negative
from .schema import KEYS, Key

__all__ = ["Problems", "converted", "flat", "not_applicable"]

_RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}
_PARENTS = {path.rpartition(".")[0] for path in KEYS} | {"optimizer", "scheduler"}
_WORDS = {
    "bool": "true or false",
    "int": "an integer of at least 0",
    "count": "an integer of at least 1",
    "integer": "an integer",
    "number": "a finite number of at least 0",
    "list": "a list",
    "text": "a string",
    "block": "an object",
}


class Problems(list[str]):
    """Problems of a configuration."""

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
        """Raise ValueError if there is a problem."""
        if self:
            raise ValueError("this DeepSpeed configuration is not accepted:\n  " + "\n  ".join(self))


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
    """Return the values of legal kinds, integers as int. Illegal and refused values are problems."""
    found = {}
    for path, value in given.items():
        key = KEYS[path]
        if value is None:
            continue
        whole = isinstance(value, float) and value.is_integer() and key.kind in ("int", "count", "integer")
        value = int(value) if whole else value
        if not _is_of_kind(value, key.kind):
            words = " or ".join(map(repr, key.kind)) if isinstance(key.kind, tuple) else _WORDS[key.kind]
            problems.add(path, f"it is {words}, not {value!r}")
        elif key.treatment == "refused" and not _is_harmless(value, key):
            problems.add(path, f"{value!r} is refused: {key.text}")
        else:
            found[path] = value
    return found


def _is_of_kind(value: Any, kind: str | tuple[str, ...]) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    if kind in ("int", "count", "integer"):
        least = {"int": 0, "count": 1, "integer": -math.inf}[kind]
        return isinstance(value, int) and not isinstance(value, bool) and value >= least
    if kind == "number":
        return is_non_negative(value)
    types: dict[str, Any] = {"bool": bool, "list": (list, tuple), "text": str, "block": Mapping}
    return isinstance(value, types[kind])


def _is_harmless(value: Any, key: Key) -> bool:
    if key.kind in ("block", "list"):
        return not value or (isinstance(value, Mapping) and not value.get("enabled", any(value.values())))
    return bool(value == key.default)


def not_applicable(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason of every key that has no effect here."""
    return {path: KEYS[path].text for path in given if KEYS[path].treatment == "not applicable"}
