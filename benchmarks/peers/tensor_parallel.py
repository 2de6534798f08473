"""DTensor's `parallelize_module`, tensor parallel and sequence parallel, with the plans of torch's tutorial."""

from __future__ import annotations

import torch
from model import ADAMW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .base import Peer, full_gradient


def make(module: nn.Module) -> Peer:
    """Columns then rows in every block; the head by columns, its logits gathered."""
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    root = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return _parallel(module, root, block)


def make_sequence(module: nn.Module) -> Peer:
    """The same, with the residual stream and the norms sharded over time."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    block = {
        "norm1": SequenceParallel(),
        "attention": whole,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    root = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return _parallel(module, root, block)


def _parallel(module: nn.Module, root: dict[str, object], block: dict[str, object]) -> Peer:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(module, mesh, root)
    for each in module.blocks:
        parallelize_module(each, mesh, block)
    groups = [[p for p in module.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], fused=True, **ADAMW)
    return Peer(module, optimizer, lambda tokens: tokens, full_gradient, splits_batch=False)
