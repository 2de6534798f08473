"""Runtime with one rank of a mesh in this process and its peers in others, over torch.distributed."""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sharding_specs import Mesh, P, shard_leaf, whole_shape

from ... import _torch
from ...checker import run_typed
from ...errors import CollectiveError, InputMismatchError, LaunchError, LayoutError, ProgramMismatchError
from ...functions import relayout_leaf
from ...ir import Aval, checksum, first_difference, hollow, sample_hash
from ...program import Program, has_owner
from ..calls import CURRENT, READS, CallGuard, NamedWait, rank_name, rank_names
from ..execution import CapturedFunction, Log, Origin
from ..handles import arrived, to_device
from ..interface import Runtime, Where
from ..launchers import launch_of_environment
from ..mpi import MPI_BACKENDS, chosen_backend, start_mpi
from ..watch import Watch, launched_store, recorded, watch_processes
from .control_group import ControlGroup
from .point_to_point import PointToPoint
from .process_communicator import require_as_many
from .transports import requested_transport

Value = TypeVar("Value")

_SECONDS = 600.0
_DERIVED = ", on tensors that require a gradient"  # collectives run one at a time and carry the gradient


class ProcessRuntime(Runtime[torch.Tensor, Program]):
    holders = "real processes"

    def __init__(
        self, mesh: Mesh, *, timeout: float | None = None, reduction: str = "fast", algorithm: str | None = None
    ) -> None:
        _initialise(_SECONDS if timeout is None else timeout, mesh)
        limit = _torch.timeout_of_all_ranks() if timeout is None else timedelta(seconds=timeout)
        self.mesh, self.turn = mesh, CallGuard()
        wait = NamedWait(mesh, mesh.processes.index(dist.get_rank()), range(mesh.size), "making process groups")
        with wait.noted():
            self.algorithm, self._transport = requested_transport("backend" if mesh.is_partial else algorithm)
            self.communicator = self._transport.communicator(
                mesh, reduction=reduction, timeout=limit, algorithm=self.algorithm
            )
            self.rank, self._meeting = (
                self.communicator.rank,
                ControlGroup(mesh, limit, self.communicator.doing, self.turn),
            )
        self.device = _device_of_ranks()

    def agree(self, doing: str, otherwise: str, number: int = 0) -> int:
        return self._meeting.agree(doing, otherwise, number)

    def exchange(self, value: Value, purpose: str) -> list[Value]:
        return self._meeting.exchange(value, purpose)

    def send_and_receive(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[torch.Tensor]]:
        with self.turn, self.communicator.bound():
            self.communicator.doing.begin("moves a state")
            return self._mail.exchange(outgoing, incoming)

    @cached_property
    def _mail(self) -> PointToPoint:
        """Messages to all ranks. The first access is a collective."""
        return PointToPoint(self.communicator, self.mesh.axes, self.rank, _device_of_ranks())

    def algorithms(self, *axes: str) -> str:
        return self.communicator.algorithms(axes or tuple(name for name, size in self.mesh.shape.items() if size > 1))

    @property
    def own_ranks(self) -> Sequence[int]:
        return (self.rank,)

    @property
    def process(self) -> int:
        return self.mesh.processes[self.rank]

    @property
    def store(self) -> dist.Store | None:
        return _torch.store_of_all_ranks()

    def missing(self) -> str:
        return "; ".join(f"{rank_name(self.mesh, rank)} {how}" for rank, how in CURRENT.gone.items())

    @property
    def calls(self) -> int:
        return self.communicator.doing.count

    # --- handles ---

    def shard(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        return self._placed(x, spec, torch.Tensor.to)

    def _placed(self, x: torch.Tensor, spec: P, move: Callable[..., torch.Tensor]) -> torch.Tensor:
        part = shard_leaf(x, spec.in_compute(), self.mesh, self.rank)
        if part.is_meta:  # another rank holds it
            return part
        placed = move(part, self.device)
        if placed is part and not _torch.has_functorch_level([x]):
            placed = placed.clone(memory_format=torch.contiguous_format)
        return spec.store(placed.contiguous())

    def own(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        return spec.store(to_device(x, self.device))

    def like_own(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        return hollow(x, whole_shape(x.shape, spec, self.mesh))

    def whole(self, handle: torch.Tensor, spec: P, whose: str = "") -> torch.Tensor:
        held, handle = self._between_ranks(spec).in_compute(), spec.fetch(handle)
        if not held.named_axes - held.reduced:
            return handle
        with self.turn, self.communicator.bound():
            self.communicator.doing.begin(READS + whose)
            for axis, owner in held.owner.items():
                handle = self.communicator.broadcast(handle, (axis,), owner)  # other ranks have no memory for it
            return relayout_leaf(handle, held.replace(owner={}), P())

    def _between_ranks(self, spec: P) -> P:
        return spec.only(axis for axis, size in self.mesh.shape.items() if size > 1).replace(reduced=())

    def shard_of(self, handle: torch.Tensor, spec: P, rank: int) -> torch.Tensor:
        return spec.fetch(handle)

    def assemble(self, spec: P, where: Where, shard: Callable[[int], torch.Tensor]) -> torch.Tensor:
        made = shard(self.rank)
        return made if made.is_meta else made.to(self.device)

    def like(self, handle: torch.Tensor, spec: P) -> torch.Tensor:
        like = torch.empty((), dtype=handle.dtype, device=self.device) if handle.is_meta else handle
        return hollow(like, whole_shape(handle.shape, spec, self.mesh))

    def declared(self, handle: torch.Tensor, made: P, spec: P) -> torch.Tensor:
        return handle

    # --- running ---

    def run(
        self, program: Program, handles: list[torch.Tensor], batch: Sequence[torch.Tensor] = (), whose: str = ""
    ) -> list[torch.Tensor]:
        """Run a program on this rank's shards. The list is donated, so that a shard is freed after its last use.

        New values of donated inputs may be `PendingMove`s.
        """
        self.agree_on(program)
        with self.turn, self.communicator.bound():
            derived = _torch.has_functorch_level(handles)
            self.begin(program, batch, whose + _DERIVED * derived)
            if derived and has_owner(program.in_specs, self.mesh):
                raise LayoutError(
                    f"{program.name}: a compiled program with a master is not differentiated on processes, because the "
                    "other ranks hold nothing to differentiate by; compile the derivative, fp.grad(plan(loss))"
                )
            if derived:
                return run_typed(program.traced, list(map(arrived, handles)))
            with torch.no_grad():
                return self._run(program, handles)

    def begin(self, program: Program, batch: Sequence[torch.Tensor] = (), whose: str = "") -> None:
        values = 0
        if self.mesh.size > 1 and not _torch.has_functorch_level(batch):
            values = sum(sample_hash(x) for x in batch if x.device.type == "cpu")
        self.communicator.doing.begin(program.cache["doing"] + whose, values)

    def run_plain(self, program: Program, handles: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run one of several programs of a step. Ranks have agreed, axes are bound, and nothing is differentiated."""
        return list(map(arrived, self._run(program, handles)))

    def _run(self, program: Program, handles: list[Any]) -> list[Any]:
        made = program.cache.get("process")
        if made is None or made[0] is not self.communicator:  # for example after another init_process_group
            one = self._transport.program(program, self.communicator)
            late = {index for index, node in enumerate(program.traced.inputs) if node in one.arriving}
            function = CapturedFunction(program, one.function()) if program.is_captured else one.function()
            made = program.cache["process"] = (self.communicator, function, late)
        handles[:] = [x if index in made[2] else arrived(x) for index, x in enumerate(handles)]
        result: list[Any] = made[1](handles)
        return result

    def replay(self, program: Program, handles: list[torch.Tensor]) -> Origin | None:
        self.agree_on(program)
        log = Log()
        with self.turn, self.communicator.bound():
            self.begin(program, whose=", op by op")
            self.run_recorded(log, program, handles)
        return self.first_origin(log)

    def run_recorded(self, log: Log, program: Program, handles: list[torch.Tensor]) -> list[torch.Tensor]:
        one = self._transport.program(program, self.communicator, record=True)
        assert one.record is not None
        return one.record.run(one.function(), handles, log)

    def first_origin(self, log: Log) -> Origin | None:
        every = self.exchange(log.first, "to compare values that are not finite")
        return min((found for found in every if found is not None), key=lambda origin: origin.order, default=None)

    def run_whole(self, program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.agree_on(program)
        self.agree_on_inputs(program, tensors)
        with self.communicator.bound():
            parts = [self.entered(x, spec) for x, spec in zip(tensors, program.in_specs, strict=True)]
            results = list(map(arrived, self.run(program, parts)))
        return [self.whole(x, spec) for x, spec in zip(results, program.out_specs, strict=True)]

    def entered(self, x: torch.Tensor, spec: P) -> torch.Tensor:
        if not _torch.has_functorch_level([x]):
            return self._placed(x, spec, to_device)
        with self.communicator.bound():
            return relayout_leaf(x, P(), self._between_ranks(spec).replace(unreduced=(), owner={}))

    # --- agreement ---

    def agree_on(self, program: Program) -> None:
        if "doing" in program.cache and program.cache.setdefault("agreed", self.communicator) is self.communicator:
            return
        if program.is_captured:
            self.communicator.require_capturable(program.name, dict.fromkeys(one.axes for one in program.collectives()))
        mine = program.fingerprint()
        all_prints = self.exchange(mine, "to compare programs")
        if len(set(all_prints)) > 1:
            self._refuse(program, all_prints)
        program.cache.update(doing=f"runs {program.name} ({mine[:8]})", agreed=self.communicator)

    def _refuse(self, program: Program, prints: list[str]) -> None:
        texts = self.exchange(program.lines(), "to compare programs")
        other = next(rank for rank, value in enumerate(prints) if value != prints[self.rank])
        same = [rank for rank, value in enumerate(prints) if value == prints[self.rank]]
        raise ProgramMismatchError(
            f"{rank_name(self.mesh, self.rank)}: the ranks are about to run different programs. "
            f"{rank_names(self.mesh, same)} {'has' if len(same) == 1 else 'have'} this one ({program.name}); "
            f"it first differs from that of {rank_name(self.mesh, other)} in\n"
            f"{first_difference(texts[self.rank], texts[other])}\n"
            "Every rank must trace the same function with the same shapes: look for code that depends on the rank."
        )

    def agree_on_inputs(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        paths = [path or f"argument {index}" for index, path in enumerate(program.in_paths)]
        self.check_same(program.name, paths, tensors)

    def checksum(self, x: torch.Tensor) -> str:
        return "" if self.mesh.size == 1 else checksum(x)

    def check_sums(
        self, name: str, paths: Sequence[str], sums: Sequence[str], parts: Sequence[P] | None = None
    ) -> None:
        """Compare checksums, or descriptions of shapes, between ranks. The tensors may be in memory one at a time."""
        if self.mesh.size == 1:
            return
        every = self.exchange((list(paths), list(sums)), "to compare inputs")
        self._require_same_paths(name, [found for found, _ in every])
        all_sums = [found for _, found in every]
        specs = parts or [P()] * len(sums)
        wrong = [index for index, spec in enumerate(specs) if self._differ([found[index] for found in all_sums], spec)]
        if not wrong:
            self._warn_of_copies(name, paths, all_sums, parts or ())
            return
        told = ", ".join(paths[index] for index in wrong[:8])
        if parts is None:
            raise InputMismatchError(
                f"{name} takes whole tensors, the same on every rank, but ranks passed different {told}. "
                "Where they are drawn, seed alike: call torch.manual_seed(0) before the first draw, on every rank. For "
                "shards of its own use train_step(batch='own'); of a checkpoint every rank loads the whole file"
            )
        axes = [axis for axis in self.mesh.axis_names if axis not in parts[wrong[0]].axes]
        raise InputMismatchError(
            f"{name}(batch='own') takes each rank's part of the batch, which ranks share that differ along "
            f"{', '.join(map(repr, axes))} alone, but such ranks passed different {told}. Let the loader split the "
            "samples along the other axes only, as fp.Sampler(length, batch, mesh) does"
        )

    def _warn_of_copies(self, name: str, paths: Sequence[str], sums: list[list[str]], parts: Sequence[P]) -> None:
        ranks = [math.prod(self.mesh.axis_size(axis) for axis in spec.axes) for spec in parts]
        split = [index for index, count in enumerate(ranks) if count > 1]
        if split and all(len({found[index] for found in sums}) == 1 for index in split):
            warnings.warn(
                f"{name}(batch='own'): all ranks passed equal {', '.join(paths[index] for index in split[:8])}, which "
                f"count as {max(ranks)} shards of a batch, each sample {max(ranks)} times. Pass each rank's own "
                "samples, as fp.Sampler reads them, or the full batch to train_step(batch='global')",
                UserWarning,
                stacklevel=5,
            )

    def _require_same_paths(self, name: str, paths: list[list[str]]) -> None:
        mine = paths[self.rank]
        other = next((rank for rank, found in enumerate(paths) if found != mine), None)
        if other is None:
            return
        its_name, my_name = rank_name(self.mesh, other), rank_name(self.mesh, self.rank)
        lacks = [f"{its_name} has no {path}" for path in mine if path not in paths[other]]
        lacks += [f"{my_name} has no {path}" for path in paths[other] if path not in mine]
        told = ", ".join(lacks[:8]) or f"{its_name} has its leaves in another order"
        raise InputMismatchError(f"{name} takes one tree, the same on every rank, but {told}")

    def _differ(self, sums: list[str], spec: P) -> bool:
        axes = [axis for axis in self.mesh.axis_names if axis in spec.axes]
        held: dict[int, str] = {}
        return any(held.setdefault(self.mesh.axis_index(rank, axes), one) != one for rank, one in enumerate(sums))


def _initialise(timeout: float, mesh: Mesh) -> None:
    if dist.is_initialized():
        require_as_many(mesh)
        _watch_once(mesh)
        return
    backend = chosen_backend() or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    if backend in MPI_BACKENDS:
        backend = start_mpi(backend)
    launch = launch_of_environment()
    if launch is None or not launch.address:
        raise LaunchError(
            "there is no process group, and no launcher has set RANK, WORLD_SIZE and MASTER_ADDR: start with torchrun, "
            "or call torch.distributed.init_process_group"
        )
    rank, size = launch.rank, launch.size
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    mesh = mesh if mesh.size == size else Mesh(process=size)
    wait, name = NamedWait(mesh, rank, range(size), "init_process_group"), partial(rank_name, mesh)
    try:
        store = launched_store(launch, timeout, name)
        watch = watch_processes(store, rank, size, name) if size > 1 else None
        with wait.noted(kinds=()), recorded():
            store = dist.PrefixStore("default_pg", store)
            options: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
            if backend == "mpi":  # torch's own knows its ranks
                options = {}
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **options)
    except CollectiveError:
        raise
    except RuntimeError as error:
        if CURRENT.gone or CURRENT.lost:
            raise wait.failure(None, error) from error
        variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
        told = launch.variables | {variable: str(os.environ.get(variable))}
        raise CollectiveError(
            f"rank {rank} on {socket.gethostname()}: the processes did not find each other, with "
            f"{', '.join(f'{name}={value}' for name, value in told.items())}. Start all {size}; on several hosts "
            f"set {variable} on each to the network interface that the others reach, as eth0. torch says: {error}"
        ) from error
    _keep(watch)
    atexit.register(_let_go_at_exit, weakref.ref(dist.group.WORLD), os.getpid())


_watched: list[weakref.ref[Any]] = []  # the process group of all ranks whose processes are watched


def _watch_once(mesh: Mesh) -> None:
    """Watch the processes of a group that the user's script made. The first call is a collective."""
    store = _torch.store_of_all_ranks()
    mesh = Mesh(process=dist.get_world_size()) if mesh.is_partial else mesh
    if mesh.size > 1 and store is not None and not (_watched and _watched[0]() is dist.group.WORLD):
        has_failed = _barrier_failed(dist.barrier(async_op=True)) if str(dist.get_backend()) == "gloo" else None
        _keep(watch_processes(store, dist.get_rank(), mesh.size, partial(rank_name, mesh), has_failed))


def _barrier_failed(barrier: dist.Work) -> Callable[[], bool]:
    """Return a function that tests whether a barrier failed. gloo's fails as soon as a connection is closed."""

    def has_failed() -> bool:
        try:
            return bool(barrier.is_completed()) and not barrier.wait()
        except RuntimeError:
            return True

    return has_failed


def _keep(watch: Watch | None) -> None:
    _watched[:] = [weakref.ref(dist.group.WORLD)]
    if watch is not None:
        weakref.finalize(dist.group.WORLD, watch.leave).atexit = False


def _let_go_at_exit(world: weakref.ref[Any], process: int) -> None:
    """Destroy the process group, as gloo's threads must end first. After an error they may wait for absent ranks."""
    is_held = dist.is_initialized() and world() is dist.group.WORLD and os.getpid() == process
    if is_held and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def _device_of_ranks() -> torch.device:
    backend = str(dist.get_backend())
    default = torch.get_default_device()
    if backend == "nccl" or (backend == "gloo" and default.type == "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
