"""Default runtime of a mesh, real processes under a launcher or else simulated ranks, and runtime of a function."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from sharding_specs import Mesh

from .. import _torch
from ..errors import CollectiveError, PipelineError
from ..functions import LocalFunction, PyTree, applied_to
from ..pipelines import pipeline_of
from .interface import Runtime
from .launchers import launch_of_environment, seeming_launch
from .mpi import MPI_BACKENDS, chosen_backend
from .pipelined import PipelineRuntime
from .processes import Bystander, ProcessRuntime
from .simulated import SimulatedRuntime

# A runtime, and the process group of all ranks when it was created, as returned by `_world`.
_chosen: dict[Mesh, tuple[Runtime[Any, Any], weakref.ref[dist.ProcessGroup] | None]] = {}
_made: dict[tuple[Mesh, str], tuple[Runtime[Any, Any], weakref.ref[dist.ProcessGroup] | None]] = {}


def default_runtime(mesh: Mesh, reduction: str = "fast") -> Runtime[Any, Any]:
    if mesh in _chosen:
        runtime, world = _chosen[mesh]
        if world is not None and world != _world():
            raise _let_go(mesh, "torch.distributed.init_process_group and use_runtime")
        return runtime
    made = _made.get((mesh, reduction))
    world = None if made is None else made[1]
    if made is not None and world == _world():
        return made[0]
    if world is not None and _world() is None:
        raise _let_go(mesh, "torch.distributed.init_process_group")
    with _torch.disable_functorch():  # the first call of a program may be inside a transform
        runtime = _of_processes(mesh, reduction) if _has_processes() else _simulated(mesh)
    _made[mesh, reduction] = (runtime, _world())
    return runtime


def runtime_of(mesh: Mesh, f: Callable[..., PyTree], reduction: str = "fast") -> Runtime[Any, Any]:
    base = default_runtime(mesh, reduction)
    plan = pipeline_of(applied_to(f))
    return base if plan is None or isinstance(base, Bystander) else PipelineRuntime(base, plan.axis)


def refuse_asynchronous(f: LocalFunction, mesh: Mesh) -> None:
    plan = pipeline_of(f.applied)
    if plan is not None and plan.on(mesh).versions is not None:
        raise PipelineError(
            f"{plan.on(mesh).name} updates weights while microbatches are in flight: use it in fp.train_step only; "
            "for a gradient, or to evaluate, take a synchronous schedule, such as '1f1b'"
        )


def use_runtime(runtime: Runtime[Any, Any]) -> None:
    """Use this runtime for its mesh from now on, for example one with a shorter timeout or with ordered sums."""
    _chosen[runtime.mesh] = (runtime, _world() if isinstance(runtime, ProcessRuntime) else None)


def rank() -> int:
    """Return the global rank of this process.

    >>> import functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> mesh = Mesh(data=2, tensor=2)
    >>> fp.rank(), mesh.coordinates(fp.rank())
    (0, {'data': 0, 'tensor': 0})

    Returns:
        The rank in torch.distributed's group of all processes. Before that group exists, the number that the launcher
        assigned. 0 in a simulated run, where one process computes every rank of the mesh.
    """
    if _has_group():
        return dist.get_rank()
    launch = launch_of_environment()
    return int(os.environ.get("RANK", "0")) if launch is None else launch.rank


def world_size() -> int:
    if _has_group():
        return dist.get_world_size()
    launch = launch_of_environment()
    return int(os.environ.get("WORLD_SIZE", "1")) if launch is None else launch.size


def is_main_rank() -> bool:
    """Whether this process prints for all ranks: it is rank 0, or the only process.

    >>> is_main_rank()
    True
    """
    return rank() == 0


def forget_runtimes() -> None:
    _chosen.clear()
    _made.clear()


def _let_go(mesh: Mesh, once_more: str) -> CollectiveError:
    return CollectiveError(
        f"torch.distributed.destroy_process_group() has ended the process group of {mesh!r}: call it after the last "
        f"step, train.params and train.whole, or call {once_more} again"
    )


def _world() -> weakref.ref[dist.ProcessGroup] | None:
    """Return the group weakly: a strong reference would keep gloo's threads alive, see `runtime.calls.handle`."""
    world = dist.group.WORLD if _has_group() else None
    return None if world is None else weakref.ref(world)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _has_processes() -> bool:
    if not dist.is_available() or dist.is_initialized():
        return dist.is_available()
    if chosen_backend() in MPI_BACKENDS:
        return True
    launch = launch_of_environment()
    return launch is not None and launch.address != ""


def _of_processes(mesh: Mesh, reduction: str) -> Runtime[Any, Any]:
    if mesh.is_partial:
        default_runtime(Mesh(process=world_size()))  # starts the processes, and is a collective of all of them
        if dist.get_rank() not in mesh.processes:
            return Bystander(mesh)
    return ProcessRuntime(mesh, reduction=reduction)


def _simulated(mesh: Mesh) -> SimulatedRuntime:
    seeming = seeming_launch()
    if mesh.size > 1 and seeming is not None:
        by, name, size = seeming
        missing = [each for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if each not in os.environ]
        warnings.warn(
            f"{by} seems to have started {size} processes ({name}={size}), but this process simulates all {mesh.size} "
            f"ranks of {mesh!r}, because the environment lacks {', '.join(missing)} and there is no process group. "
            "Start with torchrun, or set these variables or call torch.distributed.init_process_group first",
            RuntimeWarning,
            stacklevel=2,
        )
    return SimulatedRuntime(mesh)
