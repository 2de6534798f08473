"""Request to keep buffers in the state: tensors that the loss takes after the parameters, and returns new.

A step that a loss scale skips keeps its new buffers, as a loop with `torch.amp.GradScaler` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import optree
import torch

from sharding_specs import P, tree_paths

from ..functions import Applied, PyTree, SpecTree, relayout
from .state_request import StateRequest, UpdateLayouts


class BufferState(NamedTuple):
    optimizer: PyTree
    buffers: PyTree


@dataclass(frozen=True, eq=False)
class Buffers(StateRequest):
    first: dict[str, PyTree] = field(repr=False)
    tree: ClassVar[type[BufferState]] = BufferState
    passed: ClassVar[bool] = True
    optional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        wrong = [path for path, leaf in _by_path(self.first).items() if not isinstance(leaf, torch.Tensor)]
        if not isinstance(self.first, dict) or wrong:
            raise TypeError(
                "train_step(buffers=…) takes a dict of tensors, as fn, params, buffers = fp.functional(module, "
                f"buffers=True) makes it; found {', '.join(wrong) or type(self.first).__name__}"
            )

    def init(self, params: PyTree, applied: Applied, layouts: UpdateLayouts) -> PyTree:
        return optree.tree_map(torch.Tensor.detach, self.first)

    def returned(self, new: PyTree, specs: SpecTree, leaves: PyTree) -> PyTree:
        before, found, of = _by_path(leaves), _by_path(new), _by_path(specs)
        full = {path: _whole(leaf, of[path]) for path, leaf in found.items() if isinstance(leaf, torch.Tensor)}
        wrong = [
            f"{path}: {_look(full.get(path))}, and the loss takes {_look(before.get(path))}"
            for path in {**before, **found}
            if _look(full.get(path)) != _look(before.get(path))
        ]
        if wrong:
            raise ValueError(
                "train_step(buffers=…): the loss returns (value, new buffers), with the names, shapes and kinds of the "
                "buffers that it takes. It returned\n  " + "\n  ".join(wrong)
            )
        return optree.tree_structure(leaves).unflatten(full[path].to(old.dtype) for path, old in before.items())

    def __str__(self) -> str:
        return f"{len(optree.tree_leaves(self.first))} buffers in the state"


def _by_path(tree: PyTree) -> dict[str, Any]:
    return dict(zip(tree_paths(tree), optree.tree_leaves(tree), strict=True))


def _look(leaf: torch.Tensor | None) -> str:
    if leaf is None:
        return "nothing"
    kind = "floating" if leaf.is_floating_point() else str(leaf.dtype).removeprefix("torch.")
    return f"{tuple(leaf.shape)} {kind}"


def _whole(leaf: torch.Tensor, spec: P) -> torch.Tensor:
    """Gather a shard."""
    gathered: torch.Tensor = relayout(leaf, P(*spec.dims), P())
    return gathered
