"""Collectives between real processes, over torch.distributed with nccl, gloo, mpi or mpi4py.

On gloo, sums, gathers and exchanges use the algorithms in `algorithms`, which are faster than gloo's own. On other
backends they use the backend's. A reduce-scatter is an exchange of chunks and a sum in rank order. It has the same
traffic, gives the same sums as `collectives.group`, and avoids gaps in the backends. Only nccl uses its own, which is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding_specs import Mesh

from ...collectives import GATHERED, are_bound, bind, reference
from ...errors import BackendError
from ..algorithms import Algorithm, AlgorithmGroup, Selection, TaggedMessages, launch, requested_algorithm, select
from ..buffers import BucketLayout, Operand, cat_or_view, to_tensor
from ..calls import CallLog, CollectiveWait, NamedWait, PendingCollective, rank_name
from .backend import TorchCollectives
from .groups import Axes, AxisGroup, MeshGroups

_REDUCED_BY_ALL = {torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8}
_REDUCED_BY = dict.fromkeys(("gloo", "nccl"), _REDUCED_BY_ALL | {torch.float16, torch.bfloat16})


class ProcessCommunicator:
    """Communicator of a mesh: runs its collectives between processes of an initialised torch.distributed, one per rank.

    The reduction is "fast", sums in any order, on one host with gloo the same in every run; or "ordered", in rank
    order, bit-equal to simulated ranks. A timeout of None is torch's default. `algorithm` serves sums, gathers and
    exchanges on gloo: "auto" selects by a fixed rule, "backend" uses the backend's own, and others are names in
    `algorithms.ALGORITHMS`. None reads the environment variable `FUNCTIONAL_PARALLEL_ALGORITHM`, by default "auto".
    Settings must be equal on all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        reduction: str = "fast",
        timeout: timedelta | None = None,
        algorithm: str | None = None,
    ) -> None:
        require_as_many(mesh)
        if reduction not in ("fast", "ordered"):
            raise ValueError(f"reduction={reduction!r}: write 'fast' or 'ordered'")
        self.mesh = mesh
        self.rank = dist.get_rank()
        self.reduction = reduction
        self.algorithm = requested_algorithm(algorithm, reduction == "ordered")
        _agree(mesh, {"reduction": reduction, "algorithm": self.algorithm})
        self.doing, self.where = CallLog(rank_name(mesh, self.rank)), ""  # source line of the next collectives
        self._groups = MeshGroups(mesh, self.rank, timeout, self.doing)
        self._backend = TorchCollectives(self._groups, self.doing, self._wait)
        self._selected: dict[AxisGroup, dict[str, Selection]] = {}

    def bound(self) -> AbstractContextManager[None]:
        """Bind the axes of the mesh for collectives inside a `with` block."""
        return nullcontext() if are_bound(self.mesh.shape, self) else bind(self.mesh.shape, self)

    # --- the primitives ---

    def start(
        self, name: str, x: Operand, *, axes: Axes, params: Sequence[Any], overwrite: bool, where: str
    ) -> PendingCollective:
        """Start a primitive, to be waited for later. Until then the operand, a tensor or a bucket, must not change.

        `name` is psum, psum_scatter, all_gather or all_to_all. `params` are the arguments of its method after `axes`. A
        sum or gather may also have a layout; it then returns the tensors of that layout. With `overwrite`, the result
        of a psum may use the operand's memory.
        """
        self.where = where
        try:
            if name == "psum":
                return self._start_psum(x, axes, overwrite, *params)
            if name == "psum_scatter":
                return self._start_psum_scatter(x, axes, *params)
            if name == "all_gather":
                return self._start_all_gather(x, axes, *params)
            return self._start_all_to_all(to_tensor(x), axes, *params)
        finally:
            self.where = ""

    def psum(self, x: Tensor, axes: Axes) -> Tensor:
        return self._start_psum(x, axes, False).tensor()

    def psum_scatter(self, x: Tensor, axes: Axes, dim: int) -> Tensor:
        return self._start_psum_scatter(x, axes, dim).tensor()

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Tensor:
        return self._start_all_gather(x, axes, dim).tensor()

    def all_to_all(self, x: Tensor, axes: Axes, split_dim: int, concat_dim: int) -> Tensor:
        return self._start_all_to_all(x, axes, split_dim, concat_dim).tensor()

    def _start_psum(
        self, x: Operand, axes: Axes, overwrite: bool, layout: BucketLayout | None = None
    ) -> PendingCollective:
        if chosen := self._chosen("all_reduce", x, axes):
            started = launch.all_reduce(*chosen, x, overwrite, layout)
            return self._start_steps("psum", x, axes, chosen, started)
        x = to_tensor(x)
        finish = partial(launch.unpack_bucket, layout=layout)
        if self._reduces_itself(x, axes):
            return self._backend.all_reduce(x, axes, overwrite, finish)
        return self._backend.all_gather("psum", x, axes, lambda parts: finish(reference.psum(parts)[0]))

    def _start_psum_scatter(self, x: Operand, axes: Axes, dim: int) -> PendingCollective:
        if chosen := self._chosen("reduce_scatter", x, axes):
            started = launch.reduce_scatter(*chosen, x, dim)
            return self._start_steps("psum_scatter", x, axes, chosen, started)
        x = to_tensor(x)
        if self.reduction == "fast" and self._groups.over(axes).backend == "nccl":
            return self._backend.reduce_scatter(x, axes, dim)
        chunks = x.chunk(self._groups.over(axes).size, dim)
        return self._backend.all_to_all("psum_scatter", x, chunks, axes, lambda parts: reference.psum(parts)[0])

    def _start_all_gather(
        self, x: Operand, axes: Axes, dim: int, layout: BucketLayout | None = None, operation: str = "all_gather"
    ) -> PendingCollective:
        if chosen := self._chosen("all_gather", x, axes):
            return self._start_steps(operation, x, axes, chosen, launch.all_gather(*chosen, x, dim, layout))
        return self._backend.all_gather(
            operation, to_tensor(x), axes, lambda parts: launch.unpack_bucket(cat_or_view(parts, dim), layout)
        )

    def _start_all_to_all(
        self, x: Tensor, axes: Axes, split_dim: int, concat_dim: int, operation: str = "all_to_all"
    ) -> PendingCollective:
        if chosen := self._chosen("all_to_all", x, axes):
            started = launch.all_to_all(*chosen, x, split_dim, concat_dim)
            return self._start_steps(operation, x, axes, chosen, started)
        chunks = launch.resolved(x).chunk(self._groups.over(axes).size, split_dim)
        return self._backend.all_to_all(operation, x, chunks, axes, lambda parts: cat_or_view(parts, concat_dim))

    # --- with the library's algorithms ---

    def _chosen(self, kind: str, x: Operand, axes: Axes) -> tuple[Algorithm, AlgorithmGroup] | None:
        """Return the algorithm and the group of a collective, or None if it uses the backend's own."""
        selected = self._selection(axes) if x.device.type == "cpu" else None
        algorithm = selected[kind].algorithm if selected else None
        return (algorithm, self._groups.over(axes).team) if algorithm else None

    def _start_steps(
        self,
        operation: str,
        x: Operand,
        axes: Axes,
        chosen: tuple[Algorithm, AlgorithmGroup],
        started: launch.StartedCollective,
    ) -> PendingCollective:
        (algorithm, team), (steps, finish) = chosen, started
        if not algorithm.signals and (roll_call := self._groups.over(axes).roll_call):
            steps = roll_call.before(steps)
        return PendingCollective(lambda: team.run(steps), finish, self._wait(operation, x, axes))

    # --- with the backend ---

    def ppermute(self, x: Tensor, axes: Axes, pairs: Sequence[int]) -> Tensor:
        """Exchange in which each rank sends to at most one rank. All take part, so no order can deadlock."""
        me = self.axis_index(axes)
        targets = dict(zip(pairs[::2], pairs[1::2], strict=True))
        sources = {target: source for source, target in targets.items()}
        ranks = range(self._groups.over(axes).size)
        to_send = [x if targets.get(me) == rank else x.new_empty(0) for rank in ranks]
        expected = [x.shape if sources.get(me) == rank else (0,) for rank in ranks]

        def finish(received: list[Tensor]) -> Tensor:
            return received[sources[me]] if me in sources else torch.zeros_like(x)

        return self._backend.all_to_all("ppermute", x, to_send, axes, finish, expected).tensor()

    def pmax(self, x: Tensor, axes: Axes) -> Tensor:
        return self._extreme("pmax", x, axes, reference.pmax)

    def pmin(self, x: Tensor, axes: Axes) -> Tensor:
        return self._extreme("pmin", x, axes, reference.pmin)

    def _extreme(
        self, operation: str, x: Tensor, axes: Axes, among: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> Tensor:
        """Gather small operands. Exchange chunks of large ones, reduce one chunk per rank, and gather the results.

        A backend's own maximum of NaN and a number may be either, depending on the order of the ranks.
        """
        count = self._groups.over(axes).size
        if count * x.nbytes <= GATHERED:
            gathered = self._start_all_gather(x.unsqueeze(0), axes, 0, operation=operation).wait()
            return among(gathered.unbind())[0]
        padded = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % count))
        mine = self._start_all_to_all(padded, axes, 0, 0, operation).wait().chunk(count)
        gathered = self._start_all_gather(among(mine)[0], axes, 0, operation=operation).tensor()
        return gathered[: x.numel()].view(x.shape)

    def pbroadcast(self, x: Tensor, axes: Axes, source: int) -> Tensor:
        return self._backend.broadcast("pbroadcast", x, axes, source).tensor()

    # --- values of one rank ---

    def broadcast(self, x: Tensor, axes: Axes, owner: int) -> Tensor:
        held = x if self.axis_index(axes) == owner else self._room(x.shape, x.dtype, axes)
        return self._backend.broadcast("broadcast", held, axes, owner).tensor()

    def scatter(self, x: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
        chunks = x.chunk(self._groups.over(axes).size, dim)
        nothing = self._room((0,), x.dtype, axes)
        to_send = chunks if self.axis_index(axes) == owner else [nothing] * len(chunks)
        expected = [chunk.shape if rank == owner else (0,) for rank, chunk in enumerate(chunks)]
        received = self._backend.all_to_all("scatter", nothing, to_send, axes, lambda parts: parts[owner], expected)
        return received.tensor()

    def gather(self, x: Tensor, axes: Axes, dim: int, owner: int) -> Tensor:
        return torch.cat(self._collected("gather", x, axes, owner), dim)

    def reduce(self, x: Tensor, axes: Axes, owner: int) -> Tensor:
        return reference.psum(self._collected("reduce", x, axes, owner))[0]

    def _collected(self, operation: str, x: Tensor, axes: Axes, owner: int) -> list[Tensor]:
        """Return the values of all ranks, on the owner, and tensors without memory on the others."""
        ranks, is_owner = self._groups.over(axes).size, self.axis_index(axes) == owner
        to_send = [x if rank == owner else x.new_empty(0) for rank in range(ranks)]
        expected = [x.shape if is_owner else (0,)] * ranks

        def finish(received: list[Tensor]) -> list[Tensor]:
            return received if is_owner else [x.to("meta")] * ranks

        result: list[Tensor] = self._backend.all_to_all(operation, x, to_send, axes, finish, expected).wait()
        return result

    def _room(self, shape: Sequence[int], dtype: torch.dtype, axes: Axes) -> Tensor:
        """Return memory to receive a value that this rank knows only by its shape."""
        is_nccl = self._groups.over(axes).backend == "nccl"
        return torch.empty(shape, dtype=dtype, device="cuda" if is_nccl else "cpu")

    def axis_index(self, axes: Axes) -> int:
        return self.mesh.axis_index(self.rank, axes)

    # --- queries ---

    def _wait(self, operation: str, x: Operand, axes: Axes) -> CollectiveWait:
        wait = CollectiveWait(self.mesh, self.rank, self._groups.over(axes).ranks, operation, x, axes)
        wait.where = self.where
        return wait

    def messages(self, axes: Axes, device: torch.device) -> AlgorithmGroup | TaggedMessages:
        """Return messages along some axes, with ranks numbered in their order. All ranks must call this."""
        members, selected = self._groups.over(axes), self._selection(axes) if device.type == "cpu" else None
        return members.messages() if selected is None else members.team

    def algorithms(self, axes: Axes) -> str:
        """Return the algorithms of collectives over these axes, and the reasons. The first call is a collective."""
        members, selected = self._groups.over(axes), self._selection(axes)
        if selected is None:
            return f"collectives over {axes} go the way of the backend, {members.backend}"
        hosts = len(members.team.hosts)
        lines = [f"{members.team.size} ranks on {hosts} host{'s' * (hosts > 1)}"]
        for kind, found in selected.items():
            name = "backend" if found.algorithm is None else found.algorithm.name
            lines.append(f"{kind:14}  {name:9}  {found.because}")
        return "\n".join(lines)

    def _selection(self, axes: Axes) -> dict[str, Selection] | None:
        """Return the algorithms of a group, or None if the backend runs all its collectives."""
        members = self._groups.over(axes)
        if self.algorithm == "backend" or members.backend != "gloo" or members.size == 1:
            return None
        if members not in self._selected:
            what = f"the first collective over {axes}, in which its ranks find each other,"
            wait = NamedWait(self.mesh, self.rank, members.ranks, what)
            wait.where = self.where
            with wait.noted():
                team = members.team
            self._selected[members] = select(team, self.algorithm, self.reduction == "ordered")
        return self._selected[members]

    def require_capturable(self, name: str, axes: Iterable[Axes]) -> None:
        """Raise `BackendError` unless a CUDA graph can hold collectives over these axes."""
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
    """Raise `ValueError` unless there are as many processes as ranks of the mesh."""
    if dist.get_world_size() != mesh.size:
        raise ValueError(
            f"{mesh} has {mesh.size} ranks, but {dist.get_world_size()} processes are running; "
            f"start {mesh.size}, or change the mesh"
        )


def _agree(mesh: Mesh, settings: dict[str, str]) -> None:
    """Check that settings are equal on all ranks. Ranks with different ones would wait until the timeout."""
    everywhere: list[dict[str, str]] = [{}] * dist.get_world_size()
    with NamedWait(mesh, dist.get_rank(), range(mesh.size), "comparing settings with the other ranks").noted():
        dist.all_gather_object(everywhere, settings)
    for name in settings:
        values = [each[name] for each in everywhere]
        if len(set(values)) > 1:
            raise ValueError(f"{name} must be the same on every rank, but it is, by rank, {', '.join(values[:16])}")
