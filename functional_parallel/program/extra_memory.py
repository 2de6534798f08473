"""Memory that a transport of collectives uses beside the tensors of a program, as the transport itself states it."""

from __future__ import annotations

from collections.abc import Iterable

from sharding_specs import Mesh

from .traffic import Collective


class ExtraMemory:
    """Bytes on a rank beside tensors. This class is for transports that need none."""

    def of_collectives(self, collectives: Iterable[Collective], mesh: Mesh) -> int:
        """Return the maximum of bytes for the collectives of a program."""
        return 0

    def of_messages(self, sizes: Iterable[int]) -> int:
        """Return the maximum of bytes for the messages of a step to one rank, of these sizes."""
        return 0

    def note(self, size: int) -> str:
        """Return a line about this many bytes for the table of a program's memory; empty if there are none."""
        return ""


_used = [ExtraMemory()]


def use(extra: ExtraMemory) -> None:
    _used[:] = [extra]


def current() -> ExtraMemory:
    return _used[0]
