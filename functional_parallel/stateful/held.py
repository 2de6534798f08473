"""Values that stay on the ranks between calls. A call may take over their memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch

from sharding_specs import P, local_shape

from ..errors import DonatedStateError, ReentrantCallError
from ..functions import PyTree
from ..ir import Aval, hollow
from ..runtime import PendingMove, Runtime, Where, copy_if_aliased, is_simulated, storages
from .signatures import on_one_line

Shards = dict[tuple[int, int], torch.Tensor]  # by index of the value and rank

_MOST_OF_A_FAILURE = 200  # characters; the error itself was raised


@dataclass(frozen=True)
class StaticLeaf:
    """Leaf of a tree that is not a tensor, stored where a tensor has a handle."""

    value: Any


class Held(ABC):
    """Values as the runtime holds them, until a call takes over their memory."""

    __slots__ = ("_failure", "_handles", "_moves")

    def __init__(self, handles: tuple[Any, ...] | None) -> None:
        self._hold(handles)
        self._failure = ""

    def _hold(self, given: tuple[Any, ...] | None) -> None:
        self._moves = {index: each for index, each in enumerate(given or ()) if isinstance(each, PendingMove)}
        targets = (each.target if isinstance(each, PendingMove) else each for each in given or ())
        self._handles = None if given is None else tuple(targets)

    @abstractmethod
    def _donated(self, failure: str) -> str:
        """Return the message of the error for values that were donated, to a call that failed if `failure` is text."""

    @property
    def handles(self) -> tuple[Any, ...]:
        """Handle of the runtime for each leaf."""
        moves, handles = self._moves, self.without_values
        for move in moves.values():
            move.wait()
        self._moves = {}
        return handles

    @property
    def without_values(self) -> tuple[Any, ...]:
        """Handle of each leaf, for its shape and place alone: values may still be moving into its memory."""
        if self._handles is None:
            raise DonatedStateError(self._donated(self._failure))
        return self._handles

    def give(self) -> tuple[Any, ...]:
        """Return the handles, or the moves that end in them, and mark the values as donated."""
        given = tuple(self._moves.get(index, handle) for index, handle in enumerate(self.without_values))
        self._hold(None)
        return given

    @contextmanager
    def used(self, given: tuple[Any, ...]) -> Iterator[None]:
        """Context of the call that uses the values. After a failure, restore the handles `given` or note the reason."""
        try:
            yield
        except ReentrantCallError:  # nothing has run
            self._hold(given)
            raise
        except BaseException as error:
            if self._handles is None:
                self._failure = on_one_line(f"{type(error).__name__}: {error}")[:_MOST_OF_A_FAILURE]
            raise


def at_rest(spec: P) -> P:
    """Return the layout between calls of a value that a program computes with in this layout."""
    return spec.without(spec.reduced) if spec.reduced else spec


def tensors_of(tree: PyTree) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def hollow_on(tree: PyTree, device: torch.device | None) -> PyTree:
    """Return a tree for a trace: tensors without values on a device, by default torch's."""
    place = device or torch.get_default_device()

    def leaf(x: PyTree) -> PyTree:
        return hollow(Aval(tuple(x.shape), x.dtype, place)) if isinstance(x, torch.Tensor) else x

    return optree.tree_map(leaf, tree)


def tensors(handles: Sequence[Any]) -> list[Any]:
    """Return the handles that are not of static leaves."""
    return [handle for handle in handles if not isinstance(handle, StaticLeaf)]


def copied(handles: Sequence[Any]) -> tuple[Any, ...]:
    """Return copies of handles that share no memory with them."""
    return tuple(x if isinstance(x, StaticLeaf) else copy_if_aliased(x, storages(x)) for x in handles)


def full_leaves(runtime: Runtime[Any, Any], handles: Sequence[Any], specs: Sequence[P], whose: str) -> list[Any]:
    """Return the leaves as full tensors in separate memory."""
    return [
        handle.value
        if isinstance(handle, StaticLeaf)
        else copy_if_aliased(runtime.whole(handle, spec, whose), storages(handle))
        for handle, spec in zip(handles, specs, strict=True)
    ]


def require_holders(runtime: Runtime[Any, Any], handles: Sequence[Any], what: str, made: str) -> None:
    """Check that the ranks of a runtime hold the handles, which the calls `made` created."""
    first = next((handle for handle in handles if not isinstance(handle, StaticLeaf)), None)
    if first is not None and is_simulated(first) != runtime.is_simulated:
        raise ValueError(
            f"{what} lies with {'simulated ranks' if is_simulated(first) else 'real processes'}, and {runtime.mesh!r} "
            f"is {runtime.holders} by now: call torch.distributed.init_process_group before {made}"
        )


def handle_of_shards(runtime: Runtime[Any, Any], spec: P, aval: Aval, where: Where, index: int, shards: Shards) -> Any:
    """Return the handle of a full tensor like this from shards, by index and rank. Empty ones are added."""

    def shard(rank: int) -> torch.Tensor:
        if (index, rank) in shards:  # filled
            return spec.store(shards[index, rank])
        coordinates = runtime.mesh.coordinates(rank)
        size = local_shape(aval.shape, spec, runtime.mesh)
        if not all(coordinates[axis] in indices for axis, indices in where):
            return torch.empty(size, dtype=aval.dtype, device="meta")
        shards[index, rank] = torch.empty(size, dtype=aval.dtype, device=aval.device)
        return shards[index, rank]

    return runtime.assemble(spec, where, shard)
