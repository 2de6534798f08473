"""DeepSpeed's ZeRO-1, with torch's AdamW and without the clipping that it does unless told not to.

Its first use compiles a part of it, which takes minutes and needs `ninja` on the path. A run that is killed meanwhile
leaves a lock, for which all later ones wait: `rm -r ~/.cache/torch_extensions` then.
"""

from __future__ import annotations

from typing import Any

import torch
from model import ADAMW, cross_entropy
from torch import nn

from .base import Peer, part_of_batch, plain_gradient


class Engine(Peer):
    """An engine in the place of module and optimizer."""

    def __init__(self, module: nn.Module) -> None:
        import deepspeed  # optional; looks at the machine when it is imported

        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # what it is given counts
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
        }
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
        super().__init__(engine, engine.optimizer, part_of_batch, plain_gradient, splits_batch=True)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.backward(tokens)
        self.module.step()
        return loss

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.own(tokens)
        loss = cross_entropy(self.module(tokens[:, :-1]), tokens)
        self.module.backward(loss)
        return loss.detach()

    def gradients(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole gradients on this batch; nothing is updated."""
        from deepspeed.utils import safe_get_full_grad

        self.backward(tokens)
        found = {name: safe_get_full_grad(p).clone() for name, p in self.module.module.named_parameters()}
        self.module.zero_grad()
        self.module.optimizer.zero_grad()
        return found
