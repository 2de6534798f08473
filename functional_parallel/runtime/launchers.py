"""Launchers, read from the environment variables that they set: which rank this process is, and where rank 0 is."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LaunchError

_DEFAULT_PORT = 29500  # of torch's launchers
_PORTS = range(10_000, 30_000)  # below the ports that systems give to outgoing connections


@dataclass(frozen=True)
class Launch:
    by: str  # name of the launcher
    rank: int
    size: int
    local_rank: int  # number of this process on its host
    agents: int  # processes of the launcher itself, which another launcher may have started
    address: str  # host of rank 0; "" if the variables do not have it
    port: int  # of the store on rank 0
    variables: dict[str, str]  # that were read, with their values

    def __str__(self) -> str:
        where = f", rank 0 at {self.address}:{self.port}" if self.address else ""
        variables = " ".join(f"{name}={value}" for name, value in self.variables.items())
        return f"{self.by}: rank {self.rank} of {self.size}{where}, by {variables}"


class _Names(NamedTuple):
    """The variables of one launcher. Of several names, the first that is set counts."""

    by: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_TORCH = _Names("a launcher", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), agents=("GROUP_WORLD_SIZE", "CROSS_SIZE"))
_SRUN = _Names(
    "srun",
    ("SLURM_PROCID",),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
    hosts=("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_OPEN_MPI = _Names(
    "mpirun",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE",),
)
_MPICH = _Names("mpirun", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), local_size=("MPI_LOCALNRANKS",))
_LAUNCHERS = (_TORCH, _OPEN_MPI, _MPICH, _SRUN)  # the inner ones first: srun may start mpirun, and either torchrun

# Launchers that set RANK and WORLD_SIZE, by another variable that they set. accelerate runs torchrun.
_MARKS = {
    "CROSS_RANK": "deepspeed",
    "ACCELERATE_MIXED_PRECISION": "accelerate launch",
    "TORCHELASTIC_RUN_ID": "torchrun",
}


def launch_of_environment() -> Launch | None:
    found = [launch for names in _LAUNCHERS if (launch := _read(names)) is not None]
    alike = [launch for launch in found if (launch.rank, launch.size) == (found[0].rank, found[0].size)]
    for other in found:
        if other not in alike and other.size > found[0].agents:
            raise LaunchError(
                f"two launchers contradict each other. {found[0]}; {other}. Start the script by one of them, or unset "
                f"the variables of the other; a launcher on each of several hosts must know their number, as in "
                f"torchrun --nnodes={other.size}"
            )
    return next((launch for launch in alike if launch.address), alike[0] if alike else None)


def seeming_launch() -> tuple[str, str, str] | None:
    for names in _LAUNCHERS:
        size = names.size[0]
        if names is _TORCH and _value(names.rank) == "":
            continue  # WORLD_SIZE alone proves no launcher
        if os.environ.get(size, "") not in ("", "1"):
            return names.by, size, os.environ[size]
    return None


def _read(names: _Names) -> Launch | None:
    rank, size = _number(names.rank), _number(names.size)
    if rank is None or size is None:
        return None
    if names is not _TORCH and size == 1:
        return None  # a shell that Slurm gave, or a program that uses MPI alone: it may simulate ranks
    if names is _SRUN and os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in os.environ:
        return None  # the batch script, which runs once for any number of tasks
    local_size, port = _number(names.local_size), _number(("MASTER_PORT",))
    for which, below in ((names.rank, names.size), (names.local_rank, names.size), (names.local_rank, _local(names))):
        _require_below(which, below)
    on_one_host = "127.0.0.1" if local_size == size else ""
    read = (*names[1:], ("MASTER_ADDR", "MASTER_PORT"))
    return Launch(
        by=next((by for mark, by in _MARKS.items() if names is _TORCH and mark in os.environ), names.by),
        rank=rank,
        size=size,
        local_rank=_number(names.local_rank) or 0,
        agents=_number(names.agents) or -(-size // (local_size or size)),
        address=_value(("MASTER_ADDR",)) or _first_host(_value(names.hosts)) or on_one_host,
        port=_port(names.job) if port is None else port,
        variables={name: os.environ[name] for each in read for name in each if name in os.environ},
    )


def _value(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _number(names: tuple[str, ...]) -> int | None:
    text = _value(names)
    if text and not text.isdecimal():
        raise LaunchError(f"{' or '.join(names)} is {text!r}; a launcher sets it to a number")
    return int(text) if text else None


def _local(names: _Names) -> tuple[str, ...]:
    return names.local_size or (("LOCAL_WORLD_SIZE",) if names is _TORCH else ())


def _require_below(which: tuple[str, ...], below: tuple[str, ...]) -> None:
    number, size = _number(which), _number(below)
    if number is not None and size is not None and number >= size:
        first, second = (next(name for name in names if os.environ.get(name)) for names in (which, below))
        ranks = f"ranks are 0 … {size - 1}" if size else "there is no rank"
        raise LaunchError(
            f"{first}={number}, but {second}={size}, so {ranks}: start each process with its own number, counted from "
            f"0, and with {second} as the number of processes"
        )


def _first_host(hosts: str) -> str:
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split(",")[0]


def _port(job: tuple[str, ...]) -> int:
    """Return a port that all processes of a job know, and other jobs hardly take."""
    text = ".".join(os.environ[name] for name in job if name in os.environ)
    return _PORTS[zlib.crc32(text.encode()) % len(_PORTS)] if text else _DEFAULT_PORT
