"""Draws from torch's own generators, which a trace refuses."""

from __future__ import annotations

from typing import Any

import torch

from ..source import current_source
from .errors import TracingError
from .graph import named_arguments

__all__ = ["refuse_draws"]


def refuse_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draws from torch's generators: every rank has its own, so values that should be alike would not be."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    given = named_arguments(func, args, kwargs)
    if "dropout_p" in {argument.name for argument in func._schema.arguments} and not given.get("dropout_p"):
        return
    raise TracingError(
        f"{current_source()}: {func} draws from torch's own generator, of which every rank has another one; draw "
        "with fp.random.uniform or fp.random.normal, from fp.random.next_key(), or with fp.random.dropout, or pass the "
        "numbers in as an argument"
    )
