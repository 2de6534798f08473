"""Request to keep what compressed sums of gradients do not send, and to add it in the next step (LoCo, 2407.04480)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import optree
import torch

from sharding_specs import P, tree_paths

from ..functions import Applied, PyTree, SpecTree
from ..ir import scalar_beside
from ..ops import NEW_ERROR, NumberBeside
from .state_request import StateRequest, Update, UpdateLayouts

_THEN, _OF = "+", ": "  # in the key of an error: between axes, and before the path of its parameter


class FedBack(NamedTuple):
    """Errors by the axes where they differ, the summed axis first, and parameter. Dim 0 has a row per rank."""

    errors: dict[str, Any]
    steps: Any  # () int64


class FedBackState(NamedTuple):
    optimizer: PyTree
    errors: FedBack


@dataclass(frozen=True)
class ErrorFeedback(StateRequest):
    axes: tuple[str, ...]
    data: tuple[str, ...]  # all data axes, the innermost transform's first
    late: tuple[str, ...]  # the axes with sums that the update scatters
    beta: float  # weight of the newest error
    reset: int | None  # steps between two resets of the errors
    tree: ClassVar[type[FedBackState]] = FedBackState

    def init(self, params: PyTree, applied: Applied, layouts: UpdateLayouts) -> FedBack:
        steps = scalar_beside(params, 0, torch.int64)
        rows = ((key, steps.new_zeros((), dtype=dtype), shape) for key, dtype, shape, _ in self._each(layouts))
        return FedBack({key: zero.expand(shape) for key, zero, shape in rows}, steps)

    def specs(self, leaves: FedBack, layouts: UpdateLayouts) -> SpecTree:
        return FedBack({key: spec for key, *_, spec in self._each(layouts)}, P())

    def _each(self, layouts: UpdateLayouts) -> Iterator[tuple[str, torch.dtype, list[int], P]]:
        """Yield the key of each error, its dtype, its full shape and its spec."""
        size = layouts.mesh.axis_size
        for path, (like, spec) in layouts.trained().items():
            order = self._order(spec, layouts.mesh.axis_names)
            for axes in (tuple(order[number:]) for number in range(len(order))):
                if axes[0] in self.axes and size(axes[0]) > 1:
                    later = set(axes[1:])  # a dim is padded before its first scatter
                    parts = [1 if later.issuperset(each) else size(each) for each in spec.dim_axes()]
                    pairs = zip_longest(like.shape, parts, fillvalue=1)
                    shape = [size(axes), *(-(-length // count) * count for length, count in pairs)]
                    dtype = torch.promote_types(like.dtype, torch.float32)
                    yield f"{_THEN.join(axes)}{_OF}{path}", dtype, shape, P(axes, *spec.without(axes).dims)

    def _order(self, spec: P, names: Sequence[str]) -> list[str]:
        """Return the data axes in the order of their sums: scatters of the loss, of the update, and all-reduces."""
        split = [axis for axes in spec.dim_axes() for axis in axes]

        def key(axis: str) -> tuple[int, int]:
            if axis not in split:
                return 2, -names.index(axis)
            return (1, split.index(axis)) if axis in self.late else (0, self.data.index(axis))

        return sorted(self.data, key=key)

    def resize_rule(self) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]:
        return _on_ranks

    def updated(self, update: Update, leaves: FedBack) -> tuple[Update, FedBack]:
        sums = dict(zip(tree_paths(update.sums), optree.tree_leaves(update.sums), strict=True))
        scale, skipped = update.metrics.get("loss_scale"), update.metrics.get("skipped")
        steps, errors = leaves.steps + 1, dict(leaves.errors)
        for key, error in leaves.errors.items():
            axes, _, path = key.partition(_OF)
            if path in sums:
                arguments = (scale, axes.split(_THEN), path or "the parameter", self.beta)
                errors[key] = NEW_ERROR(error, sums[path], *arguments)
        if self.reset is not None:
            resets = NumberBeside(steps % self.reset == 0)
            errors = {key: torch.where(resets(error), 0, error) for key, error in errors.items()}
        new = FedBack(errors, steps)
        if skipped is not None:
            stays = NumberBeside(skipped)
            new = optree.tree_map(lambda old, new: torch.where(stays(new), old, new), leaves, new)
        return update, new

    def __str__(self) -> str:
        return f"errors of sums over {', '.join(map(repr, self.axes))} fed back"


def _on_ranks(old: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Add the errors of ranks that are gone to the errors of others, so that the sum of all errors remains."""
    new = old.new_zeros(shape)
    for rank, row in enumerate(old):
        both = tuple(map(slice, map(min, row.shape, shape[1:])))
        new[rank % len(new)][both] += row[both]
    return new
