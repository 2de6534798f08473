"""`fp.Memory`: the bytes that a program may use of each memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import BudgetError
from ..quantities import parse_bytes, readable_bytes
from .memory import MemoryUse

WAYS_OUT = {
    "parameters": "fp.zero(3, axis) or fp.tensor_parallel, which split parameters",
    "optimizer state": "fp.zero(1, axis), which splits the optimizer's state",
    "other inputs": "a smaller batch",
    "gathered": "fp.zero(3, axis, prefetch=0), which gathers fewer layers ahead",
    "gradients": "fp.zero(2, axis), which splits gradients",
    "residuals": "fp.accumulate(n), for smaller microbatches",
    "buckets": "a smaller bucket=, for smaller buffers of collectives",
    "transfers": "fp.offload(…, group=…), which moves less state at a time",
    "temporaries": "fp.accumulate(n), for smaller microbatches",
    "messages": "more microbatches in fp.pipeline, which are smaller",
}


@dataclass(frozen=True)
class Memory:
    """Budget of each memory of a rank. A program with a predicted peak above it is refused before it runs.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> step = fp.compile(lambda x: x * 2, Mesh(), in_specs=P(), out_specs=P(), memory=fp.Memory(device="1KiB"))
    >>> try:
    ...     step(torch.ones(256))
    ... except fp.BudgetError as error:
    ...     print(str(error).partition(" at ")[0])
    <lambda>: its predicted peak is 2048 bytes (2.0 KiB) of the memory 'device', 1.0 KiB above the budget,

    Args:
        device: bytes of the device's memory, as a number or as text such as "64MiB"; None for no limit. On a machine
            without an accelerator, values that no spec or move puts elsewhere count as the device's.
        host: bytes of the host's memory.
        disk: bytes of the values on disk.

    Raises:
        ValueError: for a size that is none.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> dict[str, int]:
        """Return the bytes of each memory that has a limit."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {memory: parse_bytes(size) for memory, size in given.items() if size is not None}

    def require(self, use: MemoryUse) -> None:
        """Check the predicted use of a rank."""
        for memory, limit in self.limits().items():
            found = use if memory == "device" else use.beside.get(memory)
            if found is not None and found.peak > limit:
                raise BudgetError(_refusal(found, memory, limit))


def _refusal(use: MemoryUse, memory: str, limit: int) -> str:
    alive = {kind: size for kind, size in use.alive.items() if size}
    kinds = sorted(alive, key=lambda kind: -alive[kind])
    ways = [f"Memory({memory}={use.peak})", *dict.fromkeys(WAYS_OUT[kind] for kind in kinds[:2])]
    return (
        f"{use.name}: its predicted peak is {use.peak} bytes ({readable_bytes(use.peak)}) of the memory {memory!r}, "
        f"{readable_bytes(use.peak - limit)} above the budget, at {use.ops[use.at]}. Alive there: "
        f"{', '.join(f'{kind} {readable_bytes(alive[kind])}' for kind in kinds)}. Ways out: {'; '.join(ways)}"
    )
