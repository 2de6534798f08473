"""Leaves that ranks hold, as the leaves of a checkpoint, and as the source of moves without files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sharding_specs import Mesh, P

from ..checkpoint import LeafLayout, Move, MovePlan, Peers, Piece, SavePlan, tree_from_json
from ..functions import PyTree
from ..ir import Aval
from ..runtime import Runtime, Where, default_runtime, world_size
from .held import StaticLeaf

T = TypeVar("T")

_MOST = 64 << 20  # bytes that a process sends or receives before it copies them, or one leaf
_TIMEOUT = 600.0  # seconds that a process waits until the others have written


def peers_of(runtime: Runtime[Any, Any]) -> Peers:
    """Return the processes of a run, as a checkpoint uses them."""
    size = 1 if runtime.is_simulated else runtime.mesh.size
    rank, store = (runtime.own_ranks[0], runtime.store) if size > 1 else (0, None)
    return Peers(rank, size, runtime.own_ranks, runtime.exchange, store, runtime.missing, _TIMEOUT)


def owners_along(spec: P) -> Where:
    return tuple((axis, (rank,)) for axis, rank in spec.owner.items())


def saved_shapes(checkpoint: Any) -> PyTree:
    """Return the parameters of a checkpoint without values; a dict by key if it does not have their containers."""
    known = {leaf.key: leaf for leaf in checkpoint.plan.leaves if leaf.kind == "params"}

    def leaf(key: str) -> Any:
        if key not in known:
            return checkpoint.numbers[f"params/{key}"]
        return torch.empty(known[key].shape, dtype=known[key].dtype, device="meta")

    made = checkpoint.body["tree"]
    left_out = {name.removeprefix("params/") for name in checkpoint.left_out}
    return {key: leaf(key) for key in known} if made is None else tree_from_json(made, leaf, left_out)


def leaf_layout(
    kind: str,
    key: str,
    like: torch.Tensor,
    held: tuple[int, ...],
    is_stack: bool,
    specs: Sequence[P],
    where: Callable[[int], Where],
) -> LeafLayout:
    """Return the layout of a full tensor that is in one held tensor, or one per row. `where` returns their ranks."""
    if not is_stack:
        pieces = [Piece(P(*specs[held[0]].dims), held, None, None, where(held[0]))]
    else:
        rows: dict[tuple[P, Where], list[int]] = {}
        for row, index in enumerate(held):
            rows.setdefault((P(*specs[index].dims), where(index)), []).append(row)
        pieces = [
            Piece(spec, tuple(held[row] for row in found), tuple(found), None, place)
            for (spec, place), found in rows.items()
        ]
    return LeafLayout(kind, key, tuple(like.shape), like.dtype, tuple(pieces))


class HeldLeaves:
    """Values on the ranks as the source of a move to the ranks of `target`, on the same or another mesh.

    Attributes:
        sent: bytes that `fill` has sent, by this process or by all simulated ranks.
        plan: the full tensors in these values, as the leaves of a checkpoint. It and all other attributes are as in a
            `Checkpoint` that a restore reads.
    """

    left_out: Mapping[str, Any] = {}
    kind, error, hint, cast_hint = "the state", ValueError, "", ""
    plan: SavePlan
    path, step = "the values", 0

    def __init__(
        self, runtime: Runtime[Any, Any], handles: Sequence[Any], specs: Sequence[P], target: Runtime[Any, Any]
    ) -> None:
        if runtime.is_simulated != target.is_simulated:
            raise TypeError(
                f"the values to move are of {runtime.holders}, their target is of {target.holders}: call "
                "torch.distributed.init_process_group before both"
            )
        self.runtime = self.mail = runtime
        self.mesh, self.handles, self.specs, self.sent = runtime.mesh, handles, specs, 0
        self.numbers, self.body = dict[str, Any](), dict[str, Any](tree=None, batch=None)
        if not runtime.is_simulated and (runtime.mesh.is_partial or target.mesh.is_partial):
            self.mail = default_runtime(Mesh(process=world_size()))

    def agreed(self, own: Callable[[], T]) -> list[T]:
        """Return what each process knows that has the values, in order of the processes."""
        mine = own() if self.runtime.own_ranks else None
        return [each for each in self.mail.exchange(mine, f"to move values on {self.mesh!r}") if each is not None]

    def where(self) -> list[Where]:
        """Return the indices of the ranks that hold each value, by axis."""
        pairs = zip(self.specs, self.handles, strict=True)
        return [
            owners_along(spec) + (() if isinstance(handle, StaticLeaf) else self.runtime.where(handle))
            for spec, handle in pairs
        ]

    def fill(self, items: Any, shards: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Fill shards, by the index of the held tensor and the rank of the receiving mesh."""
        for shard in shards.values():
            shard.zero_()  # padding
        plan = MovePlan(items.leaves, self.mesh, items.mesh)
        if self.runtime.is_simulated:
            for rank in {rank: None for _, rank in shards}:
                for move in plan.into(items.mesh.processes[rank]):
                    if (move.target.held, rank) in shards:
                        self._put(move, self._piece(move), shards[move.target.held, rank])
            return
        own = self.mail.process
        rank = next((rank for _, rank in shards), 0)
        for part in plan.parts(_MOST):
            incoming, outgoing = defaultdict[int, list[Move]](list), defaultdict[int, list[torch.Tensor]](list)
            for move in part.out_of(own):
                outgoing[move.receiver].append(self._piece(move))
            for move in part.into(own):
                incoming[move.sender].append(move)
            kept = incoming.pop(own, [])
            avals = {sender: [Aval(m.box.size, m.leaf.dtype) for m in moves] for sender, moves in incoming.items()}
            found = self.mail.send_and_receive(outgoing, avals)
            found[own] = list(map(self._piece, kept))
            for sender, moves in [*incoming.items(), (own, kept)]:
                for move, values in zip(moves, found[sender], strict=True):
                    self._put(move, values, shards[move.target.held, rank])

    def _piece(self, move: Move) -> torch.Tensor:
        """Return the box that a process sends, a view of its shard."""
        index, rank = move.source.held, self.mesh.processes.index(move.sender)
        shard = self.runtime.shard_of(self.handles[index], self.specs[index], rank)
        return move.source.view(shard)[move.box.within(move.source.box).slices]

    def _put(self, move: Move, values: torch.Tensor, shard: torch.Tensor) -> None:
        move.target.view(shard)[move.box.within(move.target.box).slices].copy_(values)
        self.sent += move.nbytes
