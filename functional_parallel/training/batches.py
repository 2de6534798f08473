"""The batches of a training step, or of another function of its state, as its runtime holds them."""

from __future__ import annotations

from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, register_dataclasses, tree_paths

from .. import _torch
from ..data import batch_signature, check_same_call
from ..functions import LocalFunction, PyTree, bind_positional
from ..runtime import default_runtime

__all__ = ["BatchInputs", "check_same", "tensors_of"]


class BatchInputs:
    """What a function of a state, and after it of a batch, is given.

    Args:
        f: the function, local.
        mesh: the mesh.
        own: whether each process is given the batch of its own ranks: one rank's shard on a real process, the global
            batch where all ranks are simulated in one process.
    """

    def __init__(self, f: LocalFunction, mesh: Mesh, own: bool) -> None:
        self.f, self.mesh, self.own = f, mesh, own

    def by_place(self, batch: tuple[PyTree, ...], named: dict[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments after the parameters, in order."""
        register_dataclasses(batch, named)
        return bind_positional(self.f.layout.signature, self.f.name, (None, *batch), named)[1:]

    def stay_in_step(self, runtime: Any, doing: str, batch: PyTree) -> None:
        """Make sure that ranks with batches of their own do the same, on batches that look alike."""
        if self.own:
            check_same_call(runtime, f"{doing} on {batch_signature(batch)}")

    def entered(
        self, runtime: Any, program: Any, name: str, batch: tuple[PyTree, ...], *more: torch.Tensor
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """The last inputs of a program as the runtime holds them; and those of them that all ranks were given whole.

        Args:
            runtime: the runtime.
            program: what they are for.
            name: of the function, for an error.
            batch: the batch.
            more: tensors after it, which no loader made.

        Raises:
            DifferentInputsError: the first time, when ranks were given other values than they shall be.
        """
        tensors = tensors_of(batch)
        specs = program.in_specs[len(program.in_specs) - len(tensors) - len(more) :]
        if program.cache.get("first batch", True):  # where a loader that was seeded or split wrongly shows
            check_same(runtime, name, batch, specs[: len(tensors)] if self.own else None)
            program.cache["first batch"] = _torch.has_functorch_level(tensors)
        tensors += more
        handles = [
            runtime.own(x, spec) if self.own and spec.axes else runtime.entered(x, spec)
            for x, spec in zip(tensors, specs, strict=True)
        ]
        return handles, [] if self.own else tensors

    def global_shapes(self, params: PyTree, batch: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return the global batch, without values, where this is one process's shard of it."""
        if not self.own:
            return batch
        like_own = default_runtime(self.mesh).like_own

        def whole(leaf: Any, spec: P) -> Any:
            return like_own(leaf, spec.only(self.mesh.axis_names)) if isinstance(leaf, torch.Tensor) else leaf

        return optree.tree_map(whole, batch, self.f.layout.batch_specs(self.mesh, params, batch))


def tensors_of(tree: PyTree) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def check_same(runtime: Any, name: str, tree: PyTree, parts: list[P] | None = None) -> None:
    """Nothing would be further from data parallelism than ranks that begin with parameters or moments of their own."""
    leaves = [(path, leaf) for path, leaf in zip(tree_paths(tree), optree.tree_leaves(tree), strict=True)]
    tensors = [(path or "parameters", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    runtime.check_same(name, [path for path, _ in tensors], [leaf for _, leaf in tensors], parts)
