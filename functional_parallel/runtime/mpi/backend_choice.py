"""Backend that an environment variable chooses, and the start of mpirun's processes, which may use any backend."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

BACKEND_VARIABLE = "FUNCTIONAL_PARALLEL_BACKEND"
MPI_BACKENDS = ("mpi", "mpi4py")
_KNOWN = ("gloo", "nccl", *MPI_BACKENDS)
_SET_BY_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # of Open MPI, MPICH and Intel MPI, PRRTE


def chosen_backend() -> str | None:
    name = os.environ.get(BACKEND_VARIABLE, "")
    if name and name not in _KNOWN:
        raise ValueError(f"{BACKEND_VARIABLE}={name!r}: write one of {', '.join(map(repr, _KNOWN))}")
    if name not in MPI_BACKENDS or any(variable in os.environ for variable in _SET_BY_MPIRUN):
        return name or None
    if "RANK" in os.environ:
        raise ValueError(
            f"{BACKEND_VARIABLE}={name!r}, but mpirun did not start this process: none of {', '.join(_SET_BY_MPIRUN)} "
            f"is set, and RANK={os.environ['RANK']} is. Start with mpirun, or remove {BACKEND_VARIABLE}"
        )
    return None


def start_mpi(name: str) -> str:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{BACKEND_VARIABLE}={name!r} needs mpi4py: pip install mpi4py, or functional-parallel[mpi] with an MPI"
        ) from error
    from .process_group import create

    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": here.rank}
    address = world.bcast(_address(here.size == world.size) if world.rank == 0 else None)
    here.Free()
    for variable, number in place.items():
        if os.environ.setdefault(variable, str(number)) != str(number) and variable != "LOCAL_RANK":
            raise ValueError(
                f"{variable}={os.environ[variable]}, but MPI has {number} ({BACKEND_VARIABLE}={name!r}): remove "
                f"{variable} from the environment"
            )
    os.environ.update(address)
    if name == "mpi" and dist.is_mpi_available():
        return "mpi"
    if "MPI4PY" not in dir(dist.Backend):
        dist.Backend.register_backend("mpi4py", create, extended_api=True, devices="cpu")
    return "mpi4py"


def _address(is_on_one_host: bool) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host = "127.0.0.1" if is_on_one_host else socket.gethostname()
    return {name: os.environ.get(name, value) for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", str(port)))}
