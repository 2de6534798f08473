"""Request to store parameters in the compute dtype, with float32 masters in the optimizer's state.

A master is the parameter that the optimizer updates (Micikevicius et al., arXiv 1710.03740 §3.1). With ZeRO the masters
are sharded like the optimizer's other state, so a step gathers parameters in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import optree
import torch

from ..functions import Applied, PyTree, SpecTree
from .state_request import StateRequest, Update, UpdateLayouts
from .update_sharding import flat_update


@dataclass(frozen=True)
class StoredType(StateRequest):
    dtype: torch.dtype
    kept: Callable[[PyTree], PyTree]  # for each parameter, whether it stays in its dtype

    def trained(self, params: PyTree) -> PyTree:
        return self.stored(params)

    def stored(self, params: PyTree) -> PyTree:
        return self._mapped(lambda leaf: leaf.to(self.dtype), params)

    def _mapped(
        self, change: Callable[[torch.Tensor], torch.Tensor], params: PyTree, other: int | None = None
    ) -> PyTree:
        def one(leaf: PyTree, kept: bool) -> PyTree:
            is_cast = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not kept
            return change(leaf) if is_cast else leaf if other is None else other

        return optree.tree_map(one, params, self.kept(params))

    def __str__(self) -> str:
        return f"parameters stored in {str(self.dtype).removeprefix('torch.')}"


class MasterState(NamedTuple):
    optimizer: PyTree
    masters: PyTree  # the tree of the parameters; 0 for a parameter that is stored in its own dtype


@dataclass(frozen=True)
class Masters(StoredType):
    tree: ClassVar[type[MasterState]] = MasterState
    saved: ClassVar[bool] = False

    def trained(self, params: PyTree) -> PyTree:
        return self._mapped(lambda leaf: leaf.float() if leaf.dtype.itemsize < 4 else leaf, params)

    def init(self, params: PyTree, applied: Applied, layouts: UpdateLayouts) -> PyTree:
        if flat_update(applied):  # one vector holds the masters of several parameters
            return params
        return self._mapped(lambda leaf: leaf, params, other=0)

    def specs(self, leaves: PyTree, layouts: UpdateLayouts) -> SpecTree:
        return layouts.like_params(leaves)

    def full(self, params: PyTree, leaves: PyTree) -> PyTree:
        return optree.tree_map(lambda a, stored: a if isinstance(a, torch.Tensor) else stored, leaves, params)

    weights = full

    def updated(self, update: Update, leaves: PyTree) -> tuple[Update, PyTree]:
        def stored(new: PyTree, old: PyTree) -> PyTree:
            return new.to(old.dtype) if isinstance(new, torch.Tensor) and new.dtype != old.dtype else new

        def master(leaf: PyTree, new: PyTree) -> PyTree:
            return new if isinstance(leaf, torch.Tensor) else leaf

        new = optree.tree_map(master, leaves, update.params)
        return replace(update, params=optree.tree_map(stored, update.params, update.stored)), new

    def __str__(self) -> str:
        return f"{super().__str__()}, masters in float32"
