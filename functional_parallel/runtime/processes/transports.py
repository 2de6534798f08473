"""Transports of collectives between processes, by name. The backend's own is always there; packages add others."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

from sharding_specs import Mesh

from .process_communicator import ProcessCommunicator
from .rank_program import RankProgram

ALGORITHM_VARIABLE = "FUNCTIONAL_PARALLEL_ALGORITHM"
_REMOVED = ("direct", "ring", "two_level")


@dataclass(frozen=True)
class Transport:
    communicator: type[ProcessCommunicator]
    program: type[RankProgram] = RankProgram


TRANSPORTS: dict[str, Transport] = {"backend": Transport(ProcessCommunicator)}  # "auto" takes the last


def requested_transport(given: str | None) -> tuple[str, Transport]:
    name = given or os.environ.get(ALGORITHM_VARIABLE) or "auto"
    if name in _REMOVED:
        warnings.warn(
            f"algorithm={name!r} (or {ALGORITHM_VARIABLE}) was removed, so 'auto' is used; "
            "examples/ring_allreduce.py has a ring",
            FutureWarning,
            stacklevel=3,
        )
        name = "auto"
    if name != "auto" and name not in TRANSPORTS:
        known = ", ".join(map(repr, ("auto", *TRANSPORTS)))
        raise ValueError(f"algorithm={name!r} (or {ALGORITHM_VARIABLE}): write one of {known}")
    return name, TRANSPORTS[[*TRANSPORTS][-1] if name == "auto" else name]


def communicator(
    mesh: Mesh, *, reduction: str = "fast", timeout: timedelta | None = None, algorithm: str | None = None
) -> ProcessCommunicator:
    name, transport = requested_transport(algorithm)
    return transport.communicator(mesh, reduction=reduction, timeout=timeout, algorithm=name)
