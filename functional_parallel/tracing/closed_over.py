"""Tensors with requires_grad that a traced function closes over: a training step does not train them.

A trace treats a closed-over tensor as a constant. Its name is searched in the frames of the user's code at its first
use: among local variables, then among the globals that the code names. The search covers modules, dicts, lists and
tuples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from traceback import walk_stack
from types import FrameType
from typing import Any

import optree
import torch

from sharding_specs import tree_paths

from ..ir import Source, current_source, is_library


@dataclass(frozen=True)
class ClosedOver:
    name: str | None  # expression for the tensor in the user's code, if one was found
    shape: tuple[int, ...]
    source: Source | None  # line of its first use

    def __str__(self) -> str:
        name = f"`{self.name}`" if self.name else "a tensor"
        return f"{name} of shape {self.shape}, used at {self.source or 'an unknown line'}"


def closed_over(tensor: torch.Tensor) -> ClosedOver:
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if not is_library(frame.f_code.co_filename))
    names = (name for frame in frames for name in _names(tensor, frame))
    return ClosedOver(next(names, None), tuple(tensor.shape), current_source())


def _names(tensor: torch.Tensor, frame: FrameType) -> Iterator[str]:
    code = frame.f_code
    used = ((name, frame.f_globals[name]) for name in code.co_names if name in frame.f_globals)
    for name, value in (*frame.f_locals.items(), *used):
        yield from _inside(tensor, name, value)
        if name == "self":
            for attribute, held in list(getattr(value, "__dict__", {}).items()):
                yield from _inside(tensor, f"self.{attribute}", held)


def _inside(tensor: torch.Tensor, name: str, value: Any) -> Iterator[str]:
    if value is tensor:
        yield name
    elif isinstance(value, torch.nn.Module):
        owned: Iterable[tuple[str, torch.Tensor]] = value.named_parameters(remove_duplicate=False)
        yield from (f"{name}.{path}" for path, held in owned if held is tensor)
    elif isinstance(value, (Mapping, list, tuple)):
        held_leaves = zip(tree_paths(value), optree.tree_leaves(value), strict=True)
        yield from (f"{name}[{path!r}]" for path, held in held_leaves if held is tensor)
