"""The GPT of the benchmarks as an ordinary module, and what every contestant shares: data, seed, optimizer settings.

Peers and ours train this one module, so that all compute the same. Shapes: b batch, t time, e embed, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Config:
    name: str
    layers: int
    embed: int
    heads: int = 4
    time: int = 128
    batch: int = 8
    vocab: int = 256
    fused: bool = True  # attention in one kernel, which keeps no probabilities


SIZES = {
    config.name: config
    for config in (
        Config("tiny", 4, 128, batch=4, time=64),
        Config("small", 4, 256),
        Config("wide", 4, 512, heads=8),
        Config("base", 12, 768, heads=12),
    )
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head, self.fused = config.embed // config.heads, config.fused
        self.q, self.k, self.v, self.o = (nn.Linear(config.embed, config.embed, bias=False) for _ in range(4))
        rates = 10_000.0 ** -(torch.arange(0, self.head, 2) / self.head)
        angles = torch.arange(config.time)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = partial(F.scaled_dot_product_attention, is_causal=True) if self.fused else attention
        mixed = attend(self.rotary(q), self.rotary(k), v)
        return self.o(mixed.transpose(1, 2).reshape(b, t, -1))

    def rotary(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention op by op: (b, h, t, d) each."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.embed, 4 * config.embed, bias=False)
        self.down = nn.Linear(4 * config.embed, config.embed, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.embed), nn.LayerNorm(config.embed)
        self.attention, self.mlp = Attention(config), MLP(config)
        self.edge = _identity  # where ours asks for sequence parallelism; peers do so by hooks on the modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.edge(x + self.attention(self.norm1(x)))
        return self.edge(x + self.mlp(self.norm2(x)))


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.embed)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        self.edge = _identity

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.edge(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(config: Config) -> GPT:
    """The module, with the same parameters on every rank."""
    torch.manual_seed(0)
    return GPT(config)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(config: Config, step: int) -> torch.Tensor:
    """The global batch of one step: (b, t + 1). Tokens repeat after a few, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(config.vocab, (config.batch, 1), generator=generator)
    return (starts + 7 * torch.arange(config.time + 1)) % config.vocab
