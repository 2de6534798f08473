"""The GPT of `model.py` in plain JAX: the same shapes, parameters by the same names, the same AdamW.

Parallel as JAX's own documentation has it: arrays are put on a mesh with shardings, and `jit` does the rest.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import ADAMW, Config

__all__ = ["JaxStep", "bytes_of_arrays", "bytes_sent"]

Params = dict[str, jax.Array]

MEGATRON = {  # by the end of a parameter's name; torch's linear weights are (out, in)
    "tokens.weight": P("tensor", None),
    **{f"attention.{name}.weight": P("tensor", None) for name in "qkv"},
    "attention.o.weight": P(None, "tensor"),
    "up.weight": P("tensor", None),
    "down.weight": P(None, "tensor"),
    "head.weight": P("tensor", None),
}


def loss(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    x = params["tokens.weight"][tokens[:, :-1]]
    for number in range(config.layers):
        block = {key.split(".", 2)[2]: value for key, value in params.items() if key.startswith(f"blocks.{number}.")}
        x = x + attention(block, layer_norm(x, block["norm1.weight"], block["norm1.bias"]), config)
        hidden = layer_norm(x, block["norm2.weight"], block["norm2.bias"]) @ block["mlp.up.weight"].T
        x = x + jax.nn.gelu(hidden, approximate=False) @ block["mlp.down.weight"].T
    logits = layer_norm(x, params["norm.weight"], params["norm.bias"]) @ params["head.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


def attention(block: Params, x: jax.Array, config: Config) -> jax.Array:
    b, t, _ = x.shape
    q, k, v = (
        (x @ block[f"attention.{name}.weight"].T).reshape(b, t, config.heads, config.embed // config.heads)
        for name in "qkv"
    )
    mixed = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    return mixed.reshape(b, t, -1) @ block["attention.o.weight"].T


def rotary(x: jax.Array) -> jax.Array:
    head = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** -(jnp.arange(0, head, 2) / head)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def adamw(params: Params, gradients: Params, state: tuple[Any, ...]) -> tuple[Params, tuple[Any, ...]]:
    """Decoupled weight decay, as torch computes it."""
    (b1, b2), rate, step = ADAMW["betas"], ADAMW["lr"], state[2] + 1
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[0], gradients)
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[1], gradients)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        scale = jnp.sqrt(v / (1 - b2**step)) + ADAMW["eps"]
        return p * (1 - rate * ADAMW["weight_decay"]) - rate * (m / (1 - b1**step)) / scale

    return jax.tree.map(updated, params, first, second), (first, second, step)


class JaxStep:
    """Training on all devices of this process.

    Args:
        params: whole, by name.
        kind: "data" or "tensor", the axis that everything is parallel over.
        config: the model's.
    """

    def __init__(self, params: dict[str, np.ndarray], kind: str, config: Config) -> None:
        self.mesh = Mesh(np.array(jax.devices()), (kind,), axis_types=(AxisType.Auto,))
        specs = {name: _spec(name) if kind == "tensor" else P() for name in params}
        self.shardings = {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}
        self.batch = NamedSharding(self.mesh, P("data") if kind == "data" else P())
        self.params = {name: jax.device_put(value, self.shardings[name]) for name, value in params.items()}
        zeros = partial(jax.tree.map, jnp.zeros_like, self.params)
        self.state: tuple[Any, ...] = (zeros(), zeros(), jnp.zeros((), jnp.int32))
        value_and_grad = jax.value_and_grad(partial(loss, config=config))

        def step(params: Params, state: tuple[Any, ...], tokens: jax.Array) -> Any:
            value, gradients = value_and_grad(params, tokens)
            return *adamw(params, gradients, state), value

        keeping = (self.shardings, (self.shardings, self.shardings, None), None)
        self._step = jax.jit(step, donate_argnums=(0, 1), out_shardings=keeping)
        self._gradients = jax.jit(lambda params, tokens: value_and_grad(params, tokens)[1])

    def step(self, tokens: np.ndarray) -> float:
        """The loss, when everything of the step is done."""
        self.params, self.state, value = self._step(self.params, self.state, jax.device_put(tokens, self.batch))
        jax.block_until_ready(self.params)
        return float(value)

    def gradients(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        found = self._gradients(self.params, jax.device_put(tokens, self.batch))
        return {name: np.asarray(gradient) for name, gradient in found.items()}

    def compiled(self, tokens: np.ndarray) -> Any:
        """The step after XLA has partitioned it."""
        return self._step.lower(self.params, self.state, jax.device_put(tokens, self.batch)).compile()


def _spec(name: str) -> P:
    return next((spec for end, spec in MEGATRON.items() if name.endswith(end)), P())


def bytes_of_arrays(compiled: Any) -> int:
    """What XLA lays out for one device in a step: arguments, results that do not take their place, all between."""
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes


_WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8}
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def bytes_sent(text: str, ranks: int) -> int:
    """What one device sends around rings for the collectives of a compiled program."""
    total = 0
    for results, kind in _COLLECTIVE.findall(text):
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n])) * _WIDTHS[t] for t, dims in _SHAPE.findall(results)
        ]
        share = {"all-reduce": 2 * (ranks - 1) / ranks, "reduce-scatter": ranks - 1, "collective-permute": 1}
        total += round(sum(sizes) * share.get(kind, (ranks - 1) / ranks))
    return total
