"""Host of this process, and gloo's connections. Shutting them down ends all waits of gloo here by an error.

torch has no call that ends a wait of another thread. The sockets are the new ones after a group is made, Linux only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from ..mpi import MPI_BACKENDS

_FILES = "/proc/self/fd"
_made: dict[int, int] = {}  # descriptor → inode: another file may get the number of a closed one


def host_identity() -> str:
    """Return an id that is equal for processes that Unix sockets can connect: one kernel, one network namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


@contextmanager
def recorded() -> Iterator[None]:
    """Record the sockets that gloo opens for a group in a `with` block. MPI's are left alone: it would abort."""
    before = _sockets()
    try:
        yield
    finally:
        if not (dist.is_initialized() and str(dist.get_backend()) in MPI_BACKENDS):
            _made.update(_sockets().items() - before.items())


def shut_down() -> None:
    made = dict(_made)
    _made.clear()
    for descriptor, inode in made.items():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if os.fstat(connection.fileno()).st_ino == inode and is_internet and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    found = {}
    with suppress(OSError):
        for name in os.listdir(_FILES):
            with suppress(OSError):
                if os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                    found[int(name)] = os.fstat(int(name)).st_ino
    return found
