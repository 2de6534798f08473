"""Train an attention layer, keep its parameters for generation in another layout, and decode with a cache on the ranks.

    python examples/decode_with_cache.py

Training shards the parameters by ZeRO-3. Generation splits the heads over `tensor`, with keys and values of the past in
a cache that stays on the ranks: a program with state. The result equals that of all positions at once.
Run under `torchrun --nproc-per-node 4` for real ranks.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from einops import einsum, rearrange

import functional_parallel as fp
from sharding_specs import Mesh, P

BATCH, TIME, EMBED, HEADS = 4, 6, 16, 4
HEAD_SPECS = {name: P(None, "tensor") for name in ("query", "key", "value")} | {"out": P("tensor")}

Params = dict[str, torch.Tensor]
Cache = dict[str, torch.Tensor]


def heads_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rearrange(einsum(x, weight, "b t e, e h -> b t h"), "b t (heads c) -> b t heads c", heads=HEADS)


def attend(params: Params, query: torch.Tensor, cache: Cache, is_seen: torch.Tensor) -> torch.Tensor:
    scores = einsum(query, cache["key"], "b q heads c, b t heads c -> b heads q t") / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    found = einsum(weights, cache["value"], "b heads q t, b t heads c -> b q heads c")
    result: torch.Tensor = einsum(
        rearrange(found, "b q heads c -> b q (heads c)"), params["out"], "b q h, h e -> b q e"
    )
    return result


def layer(params: Params, x: torch.Tensor) -> torch.Tensor:
    """All positions at once."""
    cache = {name: heads_of(x, params[name]) for name in ("key", "value")}
    return attend(params, heads_of(x, params["query"]), cache, torch.ones(TIME, TIME, dtype=torch.bool).tril())


def decode(params: Params, cache: Cache, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, Cache]:
    """One position: it writes its key and value into the cache, and reads those of the past."""
    times = torch.arange(TIME)
    is_now = rearrange(times == position, "t -> t 1 1")
    cache = {name: torch.where(is_now, heads_of(x, params[name]), held) for name, held in cache.items()}
    return attend(params, heads_of(x, params["query"]), cache, times <= position), cache


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return (layer(params, x)[:, :-1] - x[:, 1:]).square().mean()


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(EMBED, EMBED, generator=generator) / EMBED**0.5 for name in HEAD_SPECS}
    x = torch.randn(BATCH, TIME, EMBED, generator=generator)

    train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=4), fp.zero(3, "data"))
    state = train.init(params)
    for _ in range(5):
        state, metrics = train(state, x)

    mesh = Mesh(data=2, tensor=2)
    weights = train.frozen(state).relayout(HEAD_SPECS, mesh)  # sent between ranks, none of which holds a whole matrix
    by_head = fp.tensor_parallel("tensor", HEAD_SPECS, batch=(P(None, None, "tensor"), P(), P()))
    plan = fp.chain(by_head, fp.data_parallel("data", batch=(P("data"), P("data"), P())))
    step = fp.compile(plan(decode), mesh, state=1)
    cache = {name: torch.zeros(BATCH, TIME, HEADS, EMBED // HEADS) for name in ("key", "value")}
    outputs = []
    for position in range(TIME):
        output, cache = step(weights, cache, x[:, position : position + 1], torch.tensor(position))
        outputs.append(output)
    expected = layer(train.params(state), x)
    if fp.is_main_rank():
        print(f"trained: loss {metrics.loss:.4f}\n{weights}\ncache: {cache}")
        print(step.explain())
        print(f"decoded outputs differ by {(torch.cat(outputs, 1) - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
