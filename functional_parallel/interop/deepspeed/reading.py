"""Reader of ds_config.json, which may have comments and trailing commas."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read"]

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a file or a dict."""
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
