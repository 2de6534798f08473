"""FSDP2: `fully_shard` on every block and on the root, with and without resharding after the forward."""

from __future__ import annotations

import torch
from model import ADAMW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .base import Peer, full_gradient, part_of_batch


def make(module: nn.Module, reshard: bool = True) -> Peer:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    return Peer(module, optimizer, part_of_batch, full_gradient, splits_batch=True)


def make_keeping(module: nn.Module) -> Peer:
    return make(module, reshard=False)
