"""Collectives by MPI: a backend of torch.distributed over mpi4py, and the start of its processes."""

from .backend_choice import BACKEND_VARIABLE, MPI_BACKENDS, chosen_backend, start_mpi
