"""Law 1 on real models: value, gradient and a Hessian-vector product, to 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from einops import einsum, rearrange, repeat

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..some_cases import one_in

VOCABULARY, WIDTH, HEADS, GROUPS, TIME, BATCH = 16, 16, 4, 2, 8, 8

LLAMA = {
    "embedding": "vocabulary/tensor width",
    "layers/*/q": "width (heads/tensor dim)",
    "layers/*/kv": "width (2 heads/tensor dim)",
    "layers/*/out": "(heads/tensor dim) width",
    "layers/*/gate": "width hidden/tensor",
    "layers/*/up": "width hidden/tensor",
    "layers/*/down": "hidden/tensor width",
    "head": "width vocabulary/tensor",
    "*": P(),
}
CONV = {"first": "channels/tensor inner height width", "*": P()}

MESHES = [Mesh(data=2), Mesh(tensor=2), Mesh(data=2, tensor=2), Mesh(data=4, tensor=2), Mesh(data=8)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5


def llama_parameters(layers: int = 1) -> dict[str, Any]:
    dim = WIDTH // HEADS
    stack = [
        {
            "norm": draw(WIDTH, seed=n) + 1,
            "q": draw(WIDTH, WIDTH, seed=n),
            "kv": draw(WIDTH, 2 * GROUPS * dim, seed=n),
            "out": draw(WIDTH, WIDTH, seed=n + 9),
            "norm2": draw(WIDTH, seed=n + 5) + 1,
            "gate": draw(WIDTH, 24, seed=n),
            "up": draw(WIDTH, 24, seed=n + 3),
            "down": draw(24, WIDTH, seed=n),
        }
        for n in range(layers)
    ]
    return {"embedding": draw(VOCABULARY, WIDTH), "layers": stack, "head": draw(WIDTH, VOCABULARY, seed=7)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def attention(layer: dict[str, torch.Tensor], x: torch.Tensor, fused: bool) -> torch.Tensor:
    """Grouped queries: two key heads for four query heads."""
    q = rotate(rearrange(x @ layer["q"], "b t (h d) -> b h t d", h=HEADS))
    k, v = rearrange(x @ layer["kv"], "b t (two g d) -> two b g t d", two=2, g=GROUPS).unbind(0)
    k, v = rotate(k), v
    if fused:
        k, v = (repeat(part, "b g t d -> b (g r) t d", r=HEADS // GROUPS) for part in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        q = rearrange(q, "b (g r) t d -> b g r t d", g=GROUPS)
        scores = einsum(q, k, "b g r t d, b g s d -> b g r t s") / q.shape[-1] ** 0.5
        future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        mixed = rearrange(einsum(weights, v, "b g r t s, b g s d -> b g r t d"), "b g r t d -> b (g r) t d")
    return rearrange(mixed, "b h t d -> b t (h d)") @ layer["out"]


def llama(params: dict[str, Any], tokens: torch.Tensor, fused: bool) -> torch.Tensor:
    x = torch.nn.functional.embedding(tokens[:, :-1], params["embedding"])
    for layer in params["layers"]:
        x = x + attention(layer, rms_norm(x, layer["norm"]), fused)
        h = rms_norm(x, layer["norm2"])
        x = x + (torch.nn.functional.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = rearrange(x @ params["head"], "b t v -> (b t) v")
    return torch.nn.functional.cross_entropy(logits, rearrange(tokens[:, 1:], "b t -> (b t)"))


def plain_llama(params: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    return llama(params, tokens, fused=False)


def fused_llama(params: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    return llama(params, tokens, fused=True)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(0))


def convolutions(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Convolutions with batch norm: over a sharded batch it is the whole batch's."""
    x = torch.nn.functional.conv2d(x, params["first"], padding=1)
    x = torch.nn.functional.batch_norm(x, None, None, params["scale"], params["shift"], training=True)
    x = torch.nn.functional.max_pool2d(torch.relu(x), 2)
    x = torch.nn.functional.conv2d(x, params["second"], params["bias"], stride=2)
    return torch.nn.functional.cross_entropy(x.mean((2, 3)), y)


def conv_parameters() -> dict[str, torch.Tensor]:
    shapes = {"first": (8, 3, 3, 3), "bias": (4,), "scale": (8,), "shift": (8,), "second": (4, 8, 2, 2)}
    return {name: draw(*shape) + (name == "scale") for name, shape in shapes.items()}


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return draw(BATCH, 3, 8, 8) * 3, torch.arange(BATCH) % 4


MODELS: dict[str, Any] = {
    "llama": (plain_llama, llama_parameters, lambda: (tokens(),), LLAMA),
    "llama with fused attention": (fused_llama, llama_parameters, lambda: (tokens(),), LLAMA),
    "convolutions": (convolutions, conv_parameters, images, CONV),
}


def plan_for(mesh: Mesh, rules: Any, stage: int) -> Any:
    parts = [fp.tensor_parallel("tensor", rules)] if "tensor" in mesh.axis_names else []
    return fp.chain(*parts, *([fp.zero(stage, "data")] if "data" in mesh.axis_names else []))


@one_in(3, model=MODELS, mesh=MESHES)
def test_value_and_gradient(model: str, mesh: Mesh) -> None:
    loss, parameters, batch, rules = MODELS[model]
    for stage in (0, 3) if "data" in mesh.axis_names else (0,):
        fp.testing.assert_equivalent(loss, plan_for(mesh, rules, stage), mesh, parameters(), *batch(), rtol=1e-12)


@one_in(3, model=MODELS, mesh=MESHES[:3])
def test_a_hessian_vector_product(model: str, mesh: Mesh) -> None:
    """Forward over reverse, through attention and batch norm."""
    loss, parameters, batch, rules = MODELS[model]
    params = parameters()
    direction = optree.tree_map(lambda leaf: torch.cos(leaf * 3), params)
    local = plan_for(mesh, rules, 0)(loss)

    def product(gradient: Any) -> Any:
        return lambda p, v, *rest: fp.jvp(lambda q: gradient(q, *rest), (p,), (v,))[1]

    declared = local.resolve((params, *batch()), mesh).arguments
    step = fp.compile(product(fp.grad(local)), mesh, in_specs=(declared[0], *declared), out_specs=declared[0])
    plain = plain_llama if loss is fused_llama else loss  # torch's fused kernel has no second derivative, ours has
    found, want = step(params, direction, *batch()), product(fp.grad(plain))(params, direction, *batch())
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(want), strict=True):
        assert (a - b).abs().max() <= 1e-11 * b.abs().max()


def test_key_heads_shared_by_more_ranks_than_there_are() -> None:
    """Four ranks, two key heads: the keys stay whole, the queries are split."""
    rules = {**LLAMA, "layers/*/kv": P()}
    fp.testing.assert_equivalent(
        plain_llama, fp.tensor_parallel("tensor", rules), Mesh(tensor=4), llama_parameters(), tokens(), rtol=1e-12
    )


@pytest.mark.parametrize("plan", [fp.data_parallel("data"), fp.chain(fp.remat("layers"), fp.zero(3, "data"))], ids=repr)
def test_a_complex_number_in_the_code(plan: Any) -> None:
    """Its conjugate, by which the gradient is multiplied, is an op of a literal alone."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real((x @ w) * 2j * (1 - 3j)).square().sum()

    w, x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3), torch.arange(32.0, dtype=torch.float64).reshape(8, 4)
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), w, x, exact=True)
