"""State of another step as the source of a restore: it is moved between the ranks, without files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from sharding_specs import Mesh

from ..checkpoint import Move, MovePlan, SavePlan
from ..errors import InputMismatchError
from ..ir import Aval
from ..runtime import Where, default_runtime, world_size
from .checkpoints import holders_of
from .finite import settle
from .saved import saved_leaves
from .state import StaticLeaf, TrainState

_MOST = 64 << 20  # bytes that a process sends or receives before it copies them, or one leaf


class HeldState:
    """A state in memory, with the attributes of a checkpoint that a restore reads.

    Attributes:
        sent: bytes that `fill` has sent, by this process or by all simulated ranks.
    """

    left_out: Mapping[str, Any] = {}
    kind, error, hint, cast_hint = "the state", ValueError, "", ""

    def __init__(self, state: TrainState, target: Any) -> None:
        form = state.form
        self.state, self.manager = state, form.manager
        self.runtime = self.manager.runtime_for(state)
        if self.runtime.is_simulated != target.runtime().is_simulated:
            raise TypeError(
                f"train_step.load: the state is of {self.runtime.holders}, this step of {target.runtime().holders}: "
                "call torch.distributed.init_process_group before both"
            )
        settle(self.manager, state)
        self.mail = self.runtime
        if not self.runtime.is_simulated and (form.mesh.is_partial or target.mesh.is_partial):
            self.mail = default_runtime(Mesh(process=world_size()))
        where, numbers, self.step, batch = self._agreed()
        self.leaves = saved_leaves(self.manager, form, where.__getitem__)
        self.path = f"the state of step {self.step} on {form.mesh!r}"
        self.plan = SavePlan(form.mesh, self.leaves.tensors, self.path)
        self.numbers = {key: numbers[index] for key, index in self.leaves.numbers.items()}
        self.body, self.sent = {"tree": None, "batch": batch}, 0

    def _agreed(self) -> tuple[list[Where], list[Any], int, Any]:
        """Return what the processes that have the state know of it, and others do not."""
        form, own = self.state.form, None
        if self.runtime.own_ranks:
            where = [holders_of(self.runtime, form, self.state, index) for index in range(len(form.specs))]
            numbers = [each.value if isinstance(each, StaticLeaf) else None for each in self.state.handles]
            own = where, numbers, self.state.step, self.manager.batch_signature
        known = [each for each in self.mail.exchange(own, f"to load a state on {form.mesh!r}") if each is not None]
        steps = {each[2] for each in known}
        if len(steps) > 1:
            told = ", ".join(map(str, sorted(steps)))
            raise InputMismatchError(f"train_step.load: the ranks load states of different steps: {told}")
        found: tuple[list[Where], list[Any], int, Any] = known[0]
        return found

    def fill(self, items: Any, shards: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Fill shards, by the index of the held tensor and the rank of the restoring mesh."""
        for shard in shards.values():
            shard.zero_()  # padding
        plan = MovePlan(items.leaves, self.plan.mesh, items.mesh)
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
            found[own] = map(self._piece, kept)
            for sender, moves in [*incoming.items(), (own, kept)]:
                for move, values in zip(moves, found[sender], strict=True):
                    self._put(move, values, shards[move.target.held, rank])

    def _piece(self, move: Move) -> torch.Tensor:
        """Return the box that a process sends, a view of its shard."""
        index, rank = move.source.held, self.plan.mesh.processes.index(move.sender)
        shard = self.runtime.shard_of(self.state.handles[index], self.state.form.specs[index], rank)
        return move.source.view(shard)[move.box.within(move.source.box).slices]

    def _put(self, move: Move, values: torch.Tensor, shard: torch.Tensor) -> None:
        move.target.view(shard)[move.box.within(move.target.box).slices].copy_(values)
        self.sent += move.nbytes
