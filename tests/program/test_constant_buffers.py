"""Buffers of collectives and moves have a fixed size (CB of ZeRO-R), and `memory()` names them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.program import MEMORY_KINDS, StorageTable
from sharding_specs import Mesh

WIDTH, RANKS, BUCKET, GROUP = 32, 2, 8 << 10, 12 << 10
SHARD = WIDTH * WIDTH * 2 // RANKS  # bytes of a weight in bfloat16
PRECISION = fp.mixed_precision("bf16", reduce="bf16")


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = x + torch.tanh(x @ w)
    return x.square().mean()


def table(layers: int, *plan: Any) -> StorageTable:
    params = {"layers": [torch.empty(WIDTH, WIDTH) for _ in range(layers)]}
    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=RANKS), fp.chain(PRECISION, *plan), bucket=BUCKET)
    return StorageTable("", train.lower(params, torch.empty(8, WIDTH)).traced)


def most(found: StorageTable, kind: str, memory: str = "device") -> int:
    """The most bytes of a kind at any op."""
    own = {s: span for s, span in found.spans.items() if found.memories[s[0]] == memory and found.kind(s) == kind}
    return max(found.alive(own))


def on_disk() -> list[Any]:
    away = fp.offload(state="disk", parameters="disk", path=tempfile.gettempdir(), group=GROUP)
    return [fp.zero(3, "data"), away]


PLANS: dict[str, Callable[[], list[Any]]] = {
    "zero 2": lambda: [fp.zero(2, "data")],
    "state on the host": lambda: [fp.zero(2, "data"), fp.offload(state="host")],
    "parameters too": lambda: [fp.zero(3, "data"), fp.offload(state="host", parameters="host")],
    "on disk": on_disk,
}


@pytest.mark.parametrize("name", PLANS)
def test_buffers_do_not_grow_with_the_model(name: str) -> None:
    """A pack of `bucket` bytes, or of shards and what every rank gathers from it; a move of shards."""
    small, large = (table(layers, *PLANS[name]()) for layers in (8, 24))
    assert 0 < most(small, "buckets") == most(large, "buckets") <= (1 + RANKS) * BUCKET
    assert most(small, "transfers") == most(large, "transfers") <= BUCKET
    assert most(large, "gathered") <= 3 * RANKS * SHARD, "the layer that computes, the next, and a copy of one"
    on_host = most(large, "transfers", "host")
    assert on_host == most(small, "transfers", "host") and (on_host > 0) == (name == "on disk")
    assert on_host <= 2 * GROUP + SHARD, "the group that is updated, the one that is read, and a layer that is read"


@pytest.mark.parametrize("name", PLANS)
def test_every_byte_has_a_kind(name: str) -> None:
    memory = table(4, *PLANS[name]()).memory()
    for use in (memory, *memory.beside.values()):
        assert tuple(use.alive) == MEMORY_KINDS and sum(use.alive.values()) == use.peak
