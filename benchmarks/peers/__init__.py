"""The peers, one file each, written as their documentation tells users to: `PEERS` maps names to how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import data_parallel, deepspeed_zero, fsdp2, pipeline, tensor_parallel, zero1
from .base import Peer

__all__ = ["PEERS", "Peer"]

PEERS: dict[str, Callable[..., Any]] = {
    "DDP": data_parallel.make,
    "FSDP2, resharding": fsdp2.make,
    "FSDP2, keeping": fsdp2.make_keeping,
    "ZeroRedundancyOptimizer": zero1.make,
    "DTensor TP": tensor_parallel.make,
    "DTensor SP": tensor_parallel.make_sequence,
    **pipeline.PIPELINES,
    "DeepSpeed ZeRO-1": deepspeed_zero.Engine,
}
