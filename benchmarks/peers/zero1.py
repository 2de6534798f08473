"""DDP with ZeroRedundancyOptimizer: the optimizer's state is spread over the ranks."""

from __future__ import annotations

import torch
from model import ADAMW
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .base import Peer, part_of_batch, plain_gradient


def make(module: nn.Module) -> Peer:
    wrapped = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **ADAMW)
    return Peer(wrapped, optimizer, part_of_batch, plain_gradient, splits_batch=True)
