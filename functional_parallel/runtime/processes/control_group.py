"""Control messages between ranks outside programs: agreement on the next call, and exchange of Python objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sharding_specs import Mesh

from ... import _torch
from ...errors import CallMismatchError
from ..calls import CallGuard, CallLog, NamedWait, ProcessGroupRef, rank_name
from ..watch import recorded

Value = TypeVar("Value")


class ControlGroup:
    def __init__(self, mesh: Mesh, timeout: timedelta | None, doing: CallLog, turn: CallGuard) -> None:
        self._mesh, self._doing, self._turn = mesh, doing, turn
        self.rank, self.size = mesh.processes.index(dist.get_rank()), mesh.size
        on_devices = str(dist.get_backend()) == "nccl"
        backend = "gloo" if on_devices and dist.is_gloo_available() else None
        with recorded():
            group = dist.new_group(
                mesh.processes, backend=backend, timeout=timeout, use_local_synchronization=mesh.is_partial
            )
            self._handle = ProcessGroupRef(group)
        self.device = torch.device("cuda" if on_devices and backend is None else "cpu")

    def agree(self, doing: str, otherwise: str, number: int = 0) -> int:
        mark = int.from_bytes(hashlib.blake2b(doing.encode(), digest_size=7).digest(), "big")
        with self._turn:
            self._comes("agrees with the others about what to do")
            found = torch.tensor([mark, -mark, number], dtype=torch.int64, device=self.device)
            with self._waits(f"the agreement with all ranks, where this rank {doing},", otherwise):
                dist.all_reduce(found, dist.ReduceOp.MAX, self._handle.group)
            highest, negated_lowest, largest = found.tolist()
            if highest != -negated_lowest:
                self._refuse(self._exchange(doing, "to say what it does"), otherwise)
            return int(largest)

    def _refuse(self, plans: list[str], otherwise: str = "") -> None:
        names = {plan: rank_name(self._mesh, plans.index(plan)) for plan in dict.fromkeys(plans)}
        told = "; ".join(f"{name} {plan}" for plan, name in names.items())
        me = rank_name(self._mesh, self.rank)
        raise CallMismatchError(f"{me}: the ranks are about to do different things: {told}. {otherwise}".rstrip())

    def exchange(self, value: Value, purpose: str) -> list[Value]:
        with self._turn:
            return self._exchange(value, purpose)

    def _exchange(self, value: Value, purpose: str) -> list[Value]:
        self._comes(f"meets the others {purpose}")
        found: list[Any] = [None] * self.size
        with self._waits(f"an exchange with all ranks {purpose}"):
            dist.all_gather_object(found, (purpose, value), self._handle.group)
        purposes, values = zip(*found, strict=True)
        if len(set(purposes)) > 1:
            self._refuse([f"meets the others {each}" for each in purposes])
        return list(values)

    @contextmanager
    def _waits(self, what: str, otherwise: str = "") -> Iterator[None]:
        wait = NamedWait(self._mesh, self.rank, range(self.size), what)
        with _torch.disable_functorch(), wait.noted(advice=otherwise):
            yield

    def _comes(self, why: str) -> None:
        self._doing.begin(why)
        self._doing.announce()
