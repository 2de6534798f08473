"""Collectives between real processes, over torch.distributed with nccl, gloo, mpi or mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sharding_specs import Mesh

from ...collectives import CollectiveCall, are_bound, bind, reference
from ...errors import BackendError
from ..calls import CallLog, NamedWait, PendingCollective, Waitable, rank_name
from ..joined import as_bytes, cat_or_view, from_bytes
from .groups import Axes, MeshGroups
from .torch_messages import Messages

Result = TypeVar("Result")

GATHERED = 1 << 20  # bytes of all ranks: up to this size a maximum gathers all values; above, chunks are exchanged
_REDUCED_BY_ALL = {torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8}
_REDUCED_BY = dict.fromkeys(("gloo", "nccl"), _REDUCED_BY_ALL | {torch.float16, torch.bfloat16})


class ProcessCommunicator:
    """Communicator of a mesh: collectives between processes, one per rank, by their backend."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        reduction: str = "fast",
        timeout: timedelta | None = None,
        algorithm: str = "backend",
    ) -> None:
        require_as_many(mesh)
        if reduction not in ("fast", "ordered"):
            raise ValueError(f"reduction={reduction!r}: write 'fast' or 'ordered'")
        self.mesh = mesh
        self.rank = mesh.processes.index(dist.get_rank())
        self.reduction, self.algorithm = reduction, algorithm
        if not mesh.is_partial:
            _agree(mesh, {"reduction": reduction, "algorithm": algorithm})
        self.doing, self.where = CallLog(rank_name(mesh, self.rank)), ""  # source line of the next collectives
        self._groups = MeshGroups(mesh, self.rank, timeout, self.doing)

    def bound(self) -> AbstractContextManager[None]:
        return nullcontext() if are_bound(self.mesh.shape, self) else bind(self.mesh.shape, self)

    # --- the primitives ---

    def start(
        self, call: CollectiveCall, x: Tensor, *, overwrite: bool = False, where: str = "", operation: str = ""
    ) -> PendingCollective:
        """Start a primitive of a kind in `STARTED` on a tensor, which must not change until the wait."""
        wait = self._wait(operation or call.kind, x, call.axes, where)
        options = {"overwrite": overwrite} if call.kind == "psum" else call.routing
        started: PendingCollective = getattr(self, f"_start_{call.kind}")(x, call.axes, wait, **options)
        return started

    def psum(self, x: Tensor, axes: Axes) -> Tensor:
        return self.start(CollectiveCall("psum", None, axes), x).tensor()

    def psum_scatter(self, x: Tensor, axes: Axes, dim: int) -> Tensor:
        return self.start(CollectiveCall("psum_scatter", None, axes, dim), x).tensor()

    def all_gather(self, x: Tensor, axes: Axes, dim: int, operation: str = "") -> Tensor:
        return self.start(CollectiveCall("all_gather", None, axes, dim), x, operation=operation).tensor()

    def all_to_all(self, x: Tensor, axes: Axes, split_dim: int, concat_dim: int, operation: str = "") -> Tensor:
        call = CollectiveCall("all_to_all", None, axes, split_dim=split_dim, concat_dim=concat_dim)
        return self.start(call, x, operation=operation).tensor()

    def _start_psum(self, x: Tensor, axes: Axes, wait: NamedWait, overwrite: bool) -> PendingCollective:
        if not self._reduces_itself(x, axes):
            return self._gathered(x, axes, lambda parts: reference.psum(parts)[0], wait)
        in_place = overwrite and x.is_contiguous()
        result = x.detach() if in_place else x.detach().clone(memory_format=torch.contiguous_format)
        handle = self._groups.over(axes).handle
        return self._started(wait, axes, lambda: dist.all_reduce(result, group=handle, async_op=True), lambda: result)

    def _start_psum_scatter(self, x: Tensor, axes: Axes, wait: NamedWait, dim: int) -> PendingCollective:
        members = self._groups.over(axes)
        chunks = x.detach().chunk(members.size, dim)
        if self.reduction != "fast" or members.backend != "nccl":
            return self._exchanged(x, chunks, axes, lambda parts: reference.psum(parts)[0], wait)
        sent = torch.stack(members.by_seat(chunks))
        result = torch.empty_like(sent[0])
        return self._started(
            wait,
            axes,
            lambda: dist.reduce_scatter_tensor(result, sent, group=members.handle, async_op=True),
            lambda: result,
        )

    def _start_all_gather(self, x: Tensor, axes: Axes, wait: NamedWait, dim: int) -> PendingCollective:
        return self._gathered(x, axes, lambda parts: cat_or_view(parts, dim), wait)

    def _start_all_to_all(
        self, x: Tensor, axes: Axes, wait: NamedWait, split_dim: int, concat_dim: int
    ) -> PendingCollective:
        chunks = x.detach().resolve_conj().resolve_neg().chunk(self._groups.over(axes).size, split_dim)
        return self._exchanged(x, chunks, axes, lambda parts: cat_or_view(parts, concat_dim), wait)

    def ppermute(self, x: Tensor, axes: Axes, pairs: Sequence[int]) -> Tensor:
        """Exchange where each rank sends to at most one rank. All take part, so no order can deadlock."""
        me = self.axis_index(axes)
        targets = dict(zip(pairs[::2], pairs[1::2], strict=True))
        sources = {target: source for source, target in targets.items()}
        ranks = range(self._groups.over(axes).size)
        to_send = [x if targets.get(me) == rank else x.new_empty(0) for rank in ranks]
        expected = [x.shape if sources.get(me) == rank else (0,) for rank in ranks]

        def finish(received: list[Tensor]) -> Tensor:
            return received[sources[me]] if me in sources else torch.zeros_like(x)

        return self._exchanged(x, to_send, axes, finish, self._wait("ppermute", x, axes), expected).tensor()

    def pmax(self, x: Tensor, axes: Axes) -> Tensor:
        return self._extreme("pmax", x, axes, reference.pmax)

    def pmin(self, x: Tensor, axes: Axes) -> Tensor:
        return self._extreme("pmin", x, axes, reference.pmin)

    def _extreme(
        self, operation: str, x: Tensor, axes: Axes, among: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> Tensor:
        """Reduce here: a backend's own maximum of NaN and a number depends on the order of the ranks."""
        count = self._groups.over(axes).size
        if count * x.nbytes <= GATHERED:
            return among(self.all_gather(x.unsqueeze(0), axes, 0, operation).unbind())[0]
        padded = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % count))
        chunks = self.all_to_all(padded, axes, 0, 0, operation).chunk(count)
        return self.all_gather(among(chunks)[0], axes, 0, operation)[: x.numel()].view(x.shape)

    def pbroadcast(self, x: Tensor, axes: Axes, source: int) -> Tensor:
        return self._broadcast(x, axes, source, self._wait("pbroadcast", x, axes)).tensor()

    # --- values of one rank ---

    def broadcast(self, x: Tensor, axes: Axes, owner: int) -> Tensor:
        held = x if self.axis_index(axes) == owner else self._room(x.shape, x.dtype, axes)
        return self._broadcast(held, axes, owner, self._wait("broadcast", held, axes)).tensor()

    def scatter(self, x: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
        chunks = x.chunk(self._groups.over(axes).size, dim)
        nothing = self._room((0,), x.dtype, axes)
        to_send = chunks if self.axis_index(axes) == owner else [nothing] * len(chunks)
        expected = [chunk.shape if rank == owner else (0,) for rank, chunk in enumerate(chunks)]
        wait = self._wait("scatter", nothing, axes)
        return self._exchanged(nothing, to_send, axes, lambda parts: parts[owner], wait, expected).tensor()

    def gather(self, x: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
        return torch.cat(self._collected("gather", x, axes, owner), dim)

    def reduce(self, x: Tensor, axes: Axes, owner: int) -> Tensor:
        return reference.psum(self._collected("reduce", x, axes, owner))[0]

    def _collected(self, operation: str, x: Tensor, axes: Axes, owner: int) -> list[Tensor]:
        ranks, is_owner = self._groups.over(axes).size, self.axis_index(axes) == owner
        to_send = [x if rank == owner else x.new_empty(0) for rank in range(ranks)]
        expected = [x.shape if is_owner else (0,)] * ranks

        def finish(received: list[Tensor]) -> list[Tensor]:
            return received if is_owner else [x.to("meta")] * ranks

        wait = self._wait(operation, x, axes)
        result: list[Tensor] = self._exchanged(x, to_send, axes, finish, wait, expected).wait()
        return result

    def _room(self, shape: Sequence[int], dtype: torch.dtype, axes: Axes) -> Tensor:
        is_nccl = self._groups.over(axes).backend == "nccl"
        return torch.empty(shape, dtype=dtype, device="cuda" if is_nccl else "cpu")

    def axis_index(self, axes: Axes) -> int:
        return self.mesh.axis_index(self.rank, axes)

    # --- collectives of the backend ---

    def _gathered(
        self, x: Tensor, axes: Axes, finish: Callable[[list[Tensor]], Result], wait: NamedWait
    ) -> PendingCollective:
        members = self._groups.over(axes)
        mine = as_bytes(x)
        buffer = mine.new_empty(members.size * mine.numel())
        parts = list(buffer.split(mine.numel()) if mine.numel() else [mine] * members.size)
        is_nccl = members.backend == "nccl"
        gather = partial(dist.all_gather_into_tensor, buffer) if is_nccl else partial(dist.all_gather, parts)
        return self._started(
            wait,
            axes,
            lambda: gather(mine, members.handle, async_op=True),
            lambda: finish([from_bytes(part, x).reshape(x.shape) for part in members.in_order(parts)]),
        )

    def _exchanged(
        self,
        x: Tensor,
        chunks: Sequence[Tensor],
        axes: Axes,
        finish: Callable[[list[Tensor]], Result],
        wait: NamedWait,
        expected: Sequence[Sequence[int]] | None = None,
    ) -> PendingCollective:
        shapes = [torch.Size(shape) for shape in expected or [chunk.shape for chunk in chunks]]
        members = self._groups.over(axes)
        to_send = [as_bytes(chunk) for chunk in members.by_seat(chunks)]
        lengths = [part.numel() for part in to_send]
        sent = cat_or_view(to_send, 0)
        sizes = [0] * len(shapes)
        for seat, shape in zip(members.seats, shapes, strict=True):
            sizes[seat] = shape.numel() * x.element_size()
        received = sent.new_empty(sum(sizes))

        def end() -> Result:
            parts = zip(members.in_order(received.split(sizes)), shapes, strict=True)
            return finish([from_bytes(part, x).reshape(shape) for part, shape in parts])

        return self._started(
            wait,
            axes,
            lambda: dist.all_to_all_single(received, sent, sizes, lengths, members.handle, async_op=True),
            end,
        )

    def _broadcast(self, x: Tensor, axes: Axes, source: int, wait: NamedWait) -> PendingCollective:
        members = self._groups.over(axes)
        buffer = as_bytes(x).clone()
        return self._started(
            wait,
            axes,
            lambda: dist.broadcast(buffer, members.ranks[source], members.handle, async_op=True),
            lambda: from_bytes(buffer, x).reshape(x.shape),
        )

    def _started(
        self, wait: NamedWait, axes: Axes, start: Callable[[], Waitable | None], finish: Callable[[], Any]
    ) -> PendingCollective:
        self.doing.announce()
        call_check = self._groups.over(axes).call_check

        def start_together() -> Waitable | None:
            if call_check is not None:  # first, because gloo ends a process that receives more than it expects
                call_check.run()
            return start()

        return PendingCollective(start_together, finish, wait)

    # --- queries ---

    def _wait(self, operation: str, x: Any, axes: Axes, where: str = "") -> NamedWait:
        shape, dtype = list(x.shape), x.dtype  # `x` itself may be freed before

        def what() -> str:
            return f"{operation} over {axes} of {str(dtype).removeprefix('torch.')}{shape}"

        wait = NamedWait(self.mesh, self.rank, self._groups.over(axes).ranks, what)
        wait.where = where or self.where
        return wait

    def messages(self, axes: Axes, device: torch.device) -> Messages:
        return self._groups.over(axes).messages()

    def algorithms(self, axes: Axes) -> str:
        return f"collectives over {axes} go the way of the backend, {self._groups.over(axes).backend}"

    def require_capturable(self, name: str, axes: Iterable[Axes]) -> None:
        for each in axes:
            backend = self._groups.over(each).backend
            if backend != "nccl":
                raise BackendError(
                    f"backend='cudagraphs' cannot capture {name}: its collectives over {each} go by {backend}, whose "
                    "host takes part in each. Start the processes with nccl, or use backend='eager'"
                )

    def _reduces_itself(self, x: Tensor, axes: Axes) -> bool:
        """Whether the backend's own reduction may be used. It supports few dtypes, and its order of addition varies."""
        return self.reduction == "fast" and x.dtype in _REDUCED_BY.get(self._groups.over(axes).backend, _REDUCED_BY_ALL)


def require_as_many(mesh: Mesh) -> None:
    if dist.get_world_size() != mesh.size and not (mesh.is_partial and mesh.processes[-1] < dist.get_world_size()):
        raise ValueError(
            f"{mesh} has {mesh.size} ranks, but {dist.get_world_size()} processes are running; "
            f"start {mesh.size}, change the mesh, or name some of the processes by Mesh(…, ranks=[…])"
        )


def _agree(mesh: Mesh, settings: dict[str, str]) -> None:
    everywhere: list[dict[str, str]] = [{}] * dist.get_world_size()
    with NamedWait(mesh, dist.get_rank(), range(mesh.size), "comparing settings with the other ranks").noted():
        dist.all_gather_object(everywhere, settings)
    for name in settings:
        values = [each[name] for each in everywhere]
        if len(set(values)) > 1:
            raise ValueError(f"{name} must be the same on every rank, but it is, by rank, {', '.join(values[:16])}")
