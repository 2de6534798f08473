"""The order in which one rank runs a program's ops holds no more than `memory()` predicts, if nothing is sent."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from functional_parallel.program import StorageTable, overlapped, readers_before_writes
from sharding_specs import Mesh

LAYERS, WIDTH = 4, 64


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = x + F.layer_norm(x, (WIDTH,), layer["norm"], layer["bias"]) @ layer["w"]
        x = x + torch.stack(x.split(WIDTH // 2, -1)).amax(0).repeat(1, 2)
    return x.square().mean()


PARAMS = [{"norm": torch.ones(WIDTH), "bias": torch.zeros(WIDTH), "w": torch.zeros(WIDTH, WIDTH)}] * LAYERS


@pytest.mark.parametrize("plan", [None, fp.mixed_precision("bf16"), fp.remat()], ids=["plain", "bf16", "remat"])
def test_one_rank_holds_what_is_predicted(plan: Any) -> None:
    program = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(), plan).lower(PARAMS, torch.zeros(512, WIDTH))
    traced = program.traced
    table = StorageTable("step", traced)
    table.nodes = overlapped(traced, readers_before_writes(traced))
    assert sorted(map(id, table.nodes)) == sorted(map(id, traced.nodes))
    assert max(table.curve()) <= program.memory().peak
    position = {node: index for index, node in enumerate(table.nodes)}
    for node in table.nodes:
        if node.target is operator.getitem:
            before = range(position[node.args[0]] + 1, position[node])
            assert all(table.nodes[index].target is operator.getitem for index in before)
