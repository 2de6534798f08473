"""Batch arguments of a training step, or of another function of its state, as handles of the runtime."""

from __future__ import annotations

from typing import Any, TypeVar

import optree
import torch

from sharding_specs import Mesh, P, register_dataclasses, tree_paths

from .. import _torch
from ..data import batch_signature, check_same_call
from ..functions import LocalFunction, PyTree, SpecTree, bind_positional
from ..program import BaseProgram
from ..requests import owners_of
from ..runtime import Runtime, default_runtime
from ..stateful import tensors_of

T = TypeVar("T")


class BatchInputs:
    """Batch arguments of a function of a state and a batch. With `own`, each process passes the batch of its own ranks.

    That is one rank's shard on a real process, and the global batch if all ranks are simulated in one process.
    """

    def __init__(self, f: LocalFunction, mesh: Mesh, own: bool, passed: tuple[PyTree, ...] = ()) -> None:
        self.f, self.mesh, self.own = f, mesh, own
        self.passed = passed  # arguments between parameters and batch, without leaves
        for axis, rank in owners_of(f.applied).items() if own else ():
            raise ValueError(
                f"train_step(batch='own') takes each rank's shard of the batch, but rank {rank} of {axis!r} is the "
                "master, which scatters the batch itself: use batch='global', or leave master= out of the plan"
            )

    def positional(self, batch: tuple[PyTree, ...], named: dict[str, PyTree]) -> tuple[PyTree, ...]:
        """Return the arguments after the parameters by position. Keyword arguments are bound to their positions."""
        register_dataclasses(batch, named)
        given = (None, *self.passed, *batch)
        return bind_positional(self.f.applied.signature, self.f.name, given, named)[1 + len(self.passed) :]

    def stay_in_step(self, runtime: Runtime[Any, Any], doing: str, batch: PyTree) -> None:
        """Check that ranks with separate batches make the same call, on batches with equal signatures."""
        if self.own:
            check_same_call(runtime, f"{doing} on {batch_signature(batch)}")

    def entered(
        self,
        runtime: Runtime[Any, Any],
        program: BaseProgram,
        name: str,
        batch: tuple[PyTree, ...],
        *more: torch.Tensor,
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Convert the last inputs of a program to handles. Return also the tensors that every rank passed in full.

        `more` has tensors after the batch, which no loader made. Only the first batch of a program is compared.
        """
        tensors = tensors_of(batch)
        specs = program.in_specs[len(program.in_specs) - len(tensors) - len(more) :]
        if program.cache.get("first batch", True):  # detects a loader with a wrong seed or split
            check_same(runtime, name, batch, specs[: len(tensors)] if self.own else None)
            program.cache["first batch"] = _torch.has_functorch_level(tensors)
        tensors += more
        handles = [
            runtime.own(x, spec) if self.own and spec.axes else runtime.entered(x, spec)
            for x, spec in zip(tensors, specs, strict=True)
        ]
        return handles, [] if self.own else tensors

    def whole(self, batch: tuple[PyTree, ...], specs: SpecTree) -> tuple[PyTree, ...]:
        """Return the global batch without values, if `batch` is one process's shard of it. Else return `batch`."""
        if not self.own:
            return batch
        like_own = default_runtime(self.mesh).like_own

        def whole(leaf: T, spec: P) -> T | torch.Tensor:
            return like_own(leaf, spec.only(self.mesh.axis_names)) if isinstance(leaf, torch.Tensor) else leaf

        found: tuple[PyTree, ...] = optree.tree_map(whole, batch, specs)
        return found


def check_same(runtime: Runtime[Any, Any], name: str, tree: PyTree, parts: list[P] | None = None) -> None:
    """Check that the tensors of a tree are equal on all ranks. Different parameters or moments break data parallelism.

    `parts` has their specs, if each process passes its own shards. Then only ranks of equal shards must agree.
    """
    leaves = zip(tree_paths(tree), optree.tree_leaves(tree), strict=True)
    tensors = [(path or "parameters", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    runtime.check_same(name, [path for path, _ in tensors], [leaf for _, leaf in tensors], parts)
