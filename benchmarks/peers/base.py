"""What a contestant does: a step on its rank, and its gradients as whole tensors, for the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from model import cross_entropy
from torch import nn


@dataclass
class Peer:
    """A module, wrapped, with its optimizer.

    Attributes:
        module: what its forward is called on.
        optimizer: a torch optimizer over the module's parameters.
        own: this rank's part of the global batch.
        gradient: a parameter's gradient as a whole tensor.
        splits_batch: whether a rank's loss is that of its part alone.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    own: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[nn.Parameter], torch.Tensor]
    splits_batch: bool

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.own(tokens)
        loss = cross_entropy(self.module(tokens[:, :-1]), tokens)
        loss.backward()
        return loss.detach()

    def gradients(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole gradients on this batch, by the name that the plain module gives a parameter; nothing is updated."""
        self.backward(tokens)
        named = self.module.named_parameters()
        found = {name.removeprefix("module."): self.gradient(parameter).clone() for name, parameter in named}
        self.optimizer.zero_grad()
        return found

    def whole(self, loss: torch.Tensor) -> float:
        """The global batch's loss; for the check, not part of a step."""
        if self.splits_batch:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        return float(loss)


def part_of_batch(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def plain_gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def full_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Of a DTensor; of a plain parameter beside them, its own."""
    gradient = plain_gradient(parameter)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
