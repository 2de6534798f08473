"""Choice of the backend of the processes by an environment variable.

mpirun alone does not choose MPI: many scripts use it to start processes of gloo or nccl.
"""

from __future__ import annotations

import os

__all__ = ["BACKEND_VARIABLE", "MPI_BACKENDS", "chosen_backend"]

BACKEND_VARIABLE = "FUNCTIONAL_PARALLEL_BACKEND"
MPI_BACKENDS = ("mpi", "mpi4py")
_KNOWN = ("gloo", "nccl", *MPI_BACKENDS)
_SET_BY_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # of Open MPI, MPICH and Intel MPI, PRRTE


def chosen_backend() -> str | None:
    """Return the backend that the environment variable names, or None.

    A process that no launcher started simulates its ranks, whatever the variable says.
    """
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
