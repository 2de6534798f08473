"""Base class of runtimes. Its defaults are for a single process that has all ranks, so nothing is compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from sharding_specs import Mesh, P

from .. import _torch
from ..ir import Aval
from .execution import Origin

Handle = TypeVar("Handle")  # a sharded value, as the runtime holds it
Runnable = TypeVar("Runnable")  # the kind of program that it runs
Value = TypeVar("Value")
Where = tuple[tuple[str, tuple[int, ...]], ...]


class Runtime(ABC, Generic[Handle, Runnable]):
    base: Runtime[Any, Any] | None = None  # the runtime inside this wrapper; it compares with other processes
    mesh: Mesh
    algorithm: str = ""  # of sums, for comparison with another run
    holders: str  # the kind of ranks that hold values, for messages
    is_simulated: bool = False  # whether this process has all ranks
    device: torch.device | None = None  # target device of values; None if they are not moved

    @property
    def calls(self) -> int:
        return 0 if self.base is None else self.base.calls

    @property
    def own_ranks(self) -> Sequence[int]:
        return self.mesh.ranks if self.base is None else self.base.own_ranks

    @property
    def process(self) -> int:
        return 0 if self.base is None else self.base.process

    def send_and_receive(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[torch.Tensor]]:
        """Send tensors to processes and receive tensors from them, by global rank. Every process calls it."""
        return {} if self.base is None else self.base.send_and_receive(outgoing, incoming)

    @property
    def store(self) -> dist.Store | None:
        return None if self.base is None else self.base.store

    def missing(self) -> str:
        return "" if self.base is None else self.base.missing()

    # --- values ---

    @abstractmethod
    def shard(self, x: torch.Tensor, spec: P) -> Handle:
        """Return the handle of a full tensor."""

    def shard_for(self, program: Runnable, number: int, x: torch.Tensor, spec: P) -> Handle:
        return self.shard(x, spec)

    def shard_on(self, where: Where, x: torch.Tensor, spec: P) -> Handle:
        """Return the handle of a full tensor on the ranks with these indices."""
        return self.shard(x, spec)

    @abstractmethod
    def whole(self, handle: Handle, spec: P, whose: str = "") -> torch.Tensor:
        """Return the full tensor of a handle. `whose` describes the value in messages."""

    @abstractmethod
    def shard_of(self, handle: Handle, spec: P, rank: int) -> torch.Tensor:
        """Return the shard of a rank of this process."""

    @abstractmethod
    def assemble(self, spec: P, where: Where, shard: Callable[[int], torch.Tensor]) -> Handle:
        """Return the handle of a value from the shards of ranks of this process."""

    def where(self, handle: Handle) -> Where:
        """Return the indices of the ranks that hold a value, by axis. Along other axes all ranks hold it."""
        return ()

    def brought(self, program: Runnable, handles: list[Handle]) -> list[Handle]:
        """Return the inputs of a program on all ranks that need them. Every process calls it."""
        return handles

    @abstractmethod
    def like(self, handle: Handle, spec: P) -> torch.Tensor:
        """Return a tensor of the global shape, without memory."""

    def entered(self, x: torch.Tensor, spec: P) -> Handle:
        """Return the handle. A derivative by it is a derivative by the full tensor."""
        return self.shard(x, spec)

    def own(self, x: torch.Tensor, spec: P) -> Handle:
        """Return the handle of a batch that this process reads for its ranks. Here it has all ranks."""
        return self.entered(x, spec)

    def like_own(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        return x if self.base is None else self.base.like_own(x, spec)

    # --- programs ---

    @abstractmethod
    def run(
        self, program: Runnable, handles: list[Handle], batch: Sequence[torch.Tensor] = (), whose: str = ""
    ) -> list[Handle]:
        """Run a program. `batch` has the tensors that every rank passed in full; they are compared in messages."""

    @abstractmethod
    def run_whole(self, program: Runnable, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a program on full inputs, and return full results."""

    @abstractmethod
    def replay(self, program: Runnable, handles: list[Handle]) -> Origin | None:
        """Run a program op by op, and return the op that first computed a non-finite value, if any."""

    # --- comparison with other processes ---

    def check_same(
        self, name: str, paths: Sequence[str], tensors: Sequence[torch.Tensor], parts: Sequence[P] | None = None
    ) -> None:
        if not _torch.has_functorch_level(tensors):
            self.check_sums(name, paths, [self.checksum(x) for x in tensors], parts)

    def checksum(self, x: torch.Tensor) -> str:
        return "" if self.base is None else self.base.checksum(x)

    def check_sums(
        self, name: str, paths: Sequence[str], sums: Sequence[str], parts: Sequence[P] | None = None
    ) -> None:
        if self.base is not None:
            self.base.check_sums(name, paths, sums, parts)

    def agree(self, doing: str, otherwise: str, number: int = 0) -> int:
        return number if self.base is None else self.base.agree(doing, otherwise, number)

    def exchange(self, value: Value, purpose: str) -> list[Value]:
        return [value] if self.base is None else self.base.exchange(value, purpose)

    def agree_on(self, program: Runnable) -> None:
        if self.base is not None:
            self.base.agree_on(program)
