"""A byte-level GPT as a pure function, its sharding written where each parameter is created.

Shapes, one letter a dim: b batch, t time, e embed, h heads, d dim of a head, f hidden units of the MLP, v vocabulary.
A dim written `h/tensor` is split over the mesh axis `tensor`: heads, hidden units and vocabulary here, as in
Megatron-LM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange

import functional_parallel as fp
from sharding_specs import annotate


@dataclass(frozen=True)
class Config:
    layers: int = 4
    embed: int = 128
    heads: int = 4
    time: int = 128
    vocab: int = 256
    sequence_parallel: bool = False
    tied: bool = False  # the embedding is the head too


def init(config: Config, seed: int = 0) -> Any:
    """Parameters with their specs beside them; `sharding_specs.split` takes them apart."""
    generator = torch.Generator().manual_seed(seed)
    e, h, d, f, v = config.embed, config.heads, config.embed // config.heads, 4 * config.embed, config.vocab

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def block() -> dict[str, Any]:
        out = 0.02 / math.sqrt(2 * config.layers)  # the residual stream keeps its size with depth
        return {
            "norm1": annotate(torch.ones(e), "e"),
            "q": annotate(normal(e, h, d), "e h/tensor d"),
            "k": annotate(normal(e, h, d), "e h/tensor d"),
            "v": annotate(normal(e, h, d), "e h/tensor d"),
            "o": annotate(normal(h, d, e, scale=out), "h/tensor d e"),
            "norm2": annotate(torch.ones(e), "e"),
            "up": annotate(normal(e, f), "e f/tensor"),
            "down": annotate(normal(f, e, scale=out), "f/tensor e"),
        }

    head = {} if config.tied else {"head": annotate(normal(e, v), "e v/tensor")}
    return {
        "tokens": annotate(normal(v, e), "v/tensor e"),
        "blocks": [block() for _ in range(config.layers)],
        "norm": annotate(torch.ones(e), "e"),
        **head,
    }


def logits(params: Any, tokens: torch.Tensor, config: Config) -> torch.Tensor:
    """Scores of the next byte: (b, t) → (b, t, v)."""
    x = hidden(params, tokens, config)
    if config.tied:
        return einsum(x, params["tokens"], "b t e, v e -> b t v")
    return einsum(x, params["head"], "b t e, e v -> b t v")


def hidden(params: Any, tokens: torch.Tensor, config: Config) -> torch.Tensor:
    """Normalised values of the last layer: (b, t) → (b, t, e)."""
    x = sequence_split(F.embedding(tokens, params["tokens"]), config)
    for block in params["blocks"]:
        x = residual(x, attention(block, norm(x, block["norm1"])), config)
        x = residual(x, mlp(block, norm(x, block["norm2"])), config)
    return norm(x, params["norm"])


def attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (einsum(x, block[name], "b t e, e h d -> b h t d") for name in ("q", "k", "v"))
    mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    return einsum(mixed, block["o"], "b h t d, h d e -> b t e")


def rotary(x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate pairs of dims by angles that grow with time, so that scores depend on distance: (b, h, t, d).

    By default the positions (b, t) are those of a text from its beginning.
    """
    time, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    times = torch.arange(time, device=x.device) if positions is None else rearrange(positions, "b t -> b 1 t")
    angles = times[..., None].to(x.dtype) * rates
    a, b = rearrange(x, "b h t (two d) -> two b h t d", two=2)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def mlp(block: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(einsum(x, block["up"], "b t e, e f -> b t f"))
    return einsum(hidden, block["down"], "b t f, f e -> b t e")


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), scale)


def residual(x: torch.Tensor, change: torch.Tensor, config: Config) -> torch.Tensor:
    return sequence_split(x + change, config)


def sequence_split(x: torch.Tensor, config: Config) -> torch.Tensor:
    """Sequence parallelism is this constraint on every residual edge."""
    return fp.constrain(x, "b t/tensor e") if config.sequence_parallel else x


def loss(params: Any, tokens: torch.Tensor, config: Config) -> torch.Tensor:
    """Mean cross entropy of each byte given those before it, in nats: tokens (b, t + 1)."""
    scores = logits(params, tokens[:, :-1], config)
    return F.cross_entropy(rearrange(scores, "b t v -> (b t) v"), rearrange(tokens[:, 1:], "b t -> (b t)"))


# Generation: keys and values of past positions are in a cache, one slot for each position of a row.


def empty_cache(params: Any, rows: int, length: int) -> Any:
    """Return keys and values (b, h, slots, d) of each layer, without any position."""

    def slots(weight: torch.Tensor) -> torch.Tensor:
        _, heads, dim = weight.shape
        return weight.new_zeros(rows, heads, length, dim)

    return [(slots(block["k"]), slots(block["v"])) for block in params["blocks"]]


def cached_logits(
    params: Any, cache: Any, tokens: torch.Tensor, positions: torch.Tensor, config: Config
) -> tuple[torch.Tensor, Any]:
    """Scores after some more tokens, at these positions in their rows: (b, t), (b, t) → (b, t, v). Rows may differ."""
    x, written = F.embedding(tokens, params["tokens"]), []
    for block, held in zip(params["blocks"], cache, strict=True):
        change, held = cached_attention(block, norm(x, block["norm1"]), held, positions)
        x = x + change
        x = x + mlp(block, norm(x, block["norm2"]))
        written.append(held)
    x = norm(x, params["norm"])
    if config.tied:
        return einsum(x, params["tokens"], "b t e, v e -> b t v"), written
    return einsum(x, params["head"], "b t e, e v -> b t v"), written


def cached_attention(block: Any, x: torch.Tensor, held: Any, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
    q, k, v = (einsum(x, block[name], "b t e, e h d -> b h t d") for name in ("q", "k", "v"))
    keys, values = write(held[0], rotary(k, positions), positions), write(held[1], v, positions)
    is_past = torch.arange(keys.shape[2], device=x.device) <= rearrange(positions, "b t -> b 1 t 1")
    mixed = F.scaled_dot_product_attention(rotary(q, positions), keys, values, attn_mask=is_past)
    return einsum(mixed, block["o"], "b h t d, h d e -> b t e"), (keys, values)


def write(slots: torch.Tensor, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return slots.scatter(2, rearrange(positions, "b t -> b 1 t 1").expand_as(new), new)


def sample(params: Any, prompt: torch.Tensor, length: int, config: Config, temperature: float = 0.8) -> torch.Tensor:
    """Continue a prompt (t,) by `length` bytes, drawn with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    tokens = prompt
    for _ in range(length):
        scores = logits(params, tokens[None, -config.time :], config)[0, -1]
        choice = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice])
    return tokens
