"""Train a byte-level GPT for a moment, and generate text with a cache that stays on the ranks, over any mesh.

    python examples/generate.py --mesh data=2,tensor=2           # 4 simulated ranks in this process
    torchrun --nproc-per-node 2 examples/generate.py --mesh tensor=2

The generator takes the state of the training step. Its cache is laid out as the plan lays out keys and values, each
step writes into it in place, and prefill and decode have the logits of the training forward. With the same seed every
mesh draws the same text, up to rounding.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import corpus
import gpt
import torch

import functional_parallel as fp
from sharding_specs import Mesh, split

PROMPTS = ("def ", "import ", "class Node:\n    ", "for i in range(")


def main() -> None:
    args = arguments()
    config, mesh = gpt.Config(layers=2, embed=args.embed, time=64), Mesh.parse(args.mesh)
    params, specs = split(gpt.init(config))
    train = fp.train_step(partial(gpt.loss, config=config), fp.optim.adamw(3e-3), mesh, plan(specs, mesh))
    text, _ = corpus.load(args.data)
    state = train.init(params, batch=corpus.batch(text, 8, config.time, 0, seed=0))
    for step in range(args.steps):
        state, metrics = train(state, corpus.batch(text, 8, config.time, step, seed=0))

    generator = fp.Generator(
        partial(gpt.cached_logits, config=config),
        mesh,
        plan(specs, mesh),
        cache=gpt.empty_cache,
        temperature=args.temperature,
        top_k=args.top_k,
    )
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    generator(state, prompts, max_new_tokens=args.length)  # traces
    began = time.perf_counter()
    found = generator(state, prompts, max_new_tokens=args.length, seed=args.seed)
    rate = found.tokens.numel() / (time.perf_counter() - began)
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    drift = fp.testing.same_logits(partial(gpt.logits, config=config), generator, train.params(state), tokens)
    program = generator.programs()["decode"]
    if not fp.is_main_rank():
        return
    print(f"{mesh!r}: loss {metrics.loss:.3f} after {args.steps} steps\n")
    for prompt, row in zip(PROMPTS, found.rows(), strict=True):
        print(repr(prompt + bytes(row.tolist()).decode(errors="replace")))
    print(f"\n{rate:.0f} tokens per second; decode: {program.counts()}, peak {program.memory().peak:,} bytes on a rank")
    print(f"the logits of generation and of the training forward differ by {drift:.1e}")


def plan(specs: Any, mesh: Mesh) -> Any:
    """Tensor parallelism, ZeRO-3 and a pipeline, each if the mesh has its axis."""
    chosen: list[Any] = []
    if "tensor" in mesh.axis_names:
        chosen.append(fp.tensor_parallel("tensor", specs))
    if "data" in mesh.axis_names:
        chosen.append(fp.zero(3, "data"))
    if "pipe" in mesh.axis_names:
        chosen.append(fp.pipeline("pipe", microbatches=2, balance="layers"))
    return fp.chain(*chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=2,tensor=2", help="axes and sizes, of data, tensor and pipe")
    parser.add_argument("--data", help="a text file or a folder of them; the standard library's source by default")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--embed", type=int, default=64, help="width of the model")
    parser.add_argument("--length", type=int, default=48, help="new bytes per prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the most probable byte")
    parser.add_argument("--top-k", type=int, help="draw from this number of most probable bytes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    return parser.parse_args()


if __name__ == "__main__":
    main()
