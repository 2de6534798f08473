"""Models of the GPU benchmarks, with their batches and losses; and toys of them, for a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from model import GPT, Config, batch, cross_entropy
from torch import nn

Loss = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]  # of a model and a batch


@dataclass(frozen=True)
class Workload:
    """A model to train, on the default device."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], torch.Tensor]
    loss: Loss
    flops: Callable[[int], int] | None = None  # of a step, by the number of parameters


def _gpt(config: Config) -> Workload:
    def flops(parameters: int) -> int:
        """The convention of PaLM: six per parameter and token, and attention."""
        tokens = config.batch * config.time
        return tokens * (6 * parameters + 12 * config.layers * config.embed * config.time)

    def loss(model: Callable[..., torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens[:, :-1]), tokens)

    return Workload(partial(GPT, config), partial(batch, config), loss, flops)


class Convolutions(nn.Module):
    """Blocks of convolution, group norm and relu. Shapes: b batch, c channels, h and w pixels."""

    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((-2, -1))


def _convolutions(blocks: int, channels: int, images: int, pixels: int) -> Workload:
    def images_of(step: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(step)
        return torch.randn(images, 3, pixels, pixels, generator=generator, device="cpu")

    def loss(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x).float(), x.mean((1, 2, 3))[:, None].expand(-1, channels))

    return Workload(partial(Convolutions, blocks, channels), images_of, loss)


WORKLOADS = {
    "gpt": _gpt(Config("gpt", 24, 1024, heads=16, time=1024, batch=8, vocab=50304)),
    "small gpt": _gpt(Config("small gpt", 12, 128, heads=4, time=64, batch=2)),
    "group norm": _convolutions(16, 128, 64, 32),
}
TOYS = {
    "gpt": _gpt(Config("gpt", 1, 32, heads=2, time=16, batch=2, vocab=64)),
    "small gpt": _gpt(Config("small gpt", 1, 16, heads=2, time=8, batch=2, vocab=64)),
    "group norm": _convolutions(1, 8, 2, 4),
}
