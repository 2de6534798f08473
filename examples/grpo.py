"""Train a small GPT by its own samples: GRPO, or DPO on the best and the worst sample of each prompt.

    python examples/grpo.py --mesh data=2,tensor=2
    torchrun --nproc-per-node 4 examples/grpo.py --mesh data=2,tensor=2
    python examples/grpo.py --loss dpo --sample-mesh tensor=2

Each step samples answers, scores them, computes advantages and updates the parameters: five pure functions, each under
the plan of the mesh. Samples are drawn with a cache, and their log-probabilities come from the training program, so
the first update has a ratio of exactly 1 and a divergence of exactly 0. With `--sample-mesh` the parameters move into
the layout of another mesh before they generate. `--double` computes in float64: then all meshes draw the same samples.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import gpt
import reporting
import rlhf
import torch
from einops import repeat

import functional_parallel as fp
from sharding_specs import Mesh, P, split


def main() -> None:
    args = arguments()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    say = print if fp.is_main_rank() else (lambda *_: None)
    mesh = Mesh.parse(args.mesh)
    params, specs = split(gpt.init(rlhf.CONFIG))
    params, plan = rlhf.in_default_dtype(params), rlhf.plan_of(specs, mesh, args.zero)
    train = fp.train_step(partial(loss, args=args), fp.optim.adamw(args.lr), mesh, plan, has_aux=True, clip=1.0)
    of_policy, of_reference = train.compile(plan(rlhf.log_probs)), fp.compile(plan(rlhf.log_probs), mesh)
    whiten = fp.partition(partial(rlhf.group_advantage, group=args.group), "data", P("data"), P("data"))
    advantage = fp.compile(whiten, mesh)
    sample = rlhf.Sampler(Mesh.parse(args.sample_mesh or args.mesh), specs)

    state, reference, rewards = start(train, params, args)
    say(f"held out, before: reward {sample.held_out(state):.3f}")
    while len(rewards) < args.steps:
        step = len(rewards)
        tokens = sample(state, repeat(rlhf.prompts(args.prompts, step), "p t -> (p g) t", g=args.group), step)
        scores = rlhf.finite(rlhf.score(tokens))
        rewards.append(float(scores.mean()))
        batch = {"advantage": advantage(scores)[:, None]}
        if args.loss == "dpo":
            tokens, batch = rlhf.pairs(tokens, scores, args.group), {}
        batch |= {"tokens": tokens, "old": of_policy(state, tokens), "reference": of_reference(reference, tokens)}
        told = f"{step}: reward {rewards[-1]:.3f}"
        for update in range(args.updates):
            state, metrics = train(state, batch)
            if not update:
                told += f", |ratio − 1| {metrics.aux['off']:.1e}, divergence {metrics.aux['divergence']:.4f}"
        say(told)
    say(f"held out, after: reward {sample.held_out(state):.3f}")
    if args.save:
        train.save(state, f"{args.save}/policy", extra={"rewards": rewards})
        reference.save(f"{args.save}/reference")
    reporting.curve(rewards, Path(args.plot), args.loss.upper())


def loss(params: Any, batch: rlhf.Tensors, args: argparse.Namespace) -> tuple[torch.Tensor, rlhf.Tensors]:
    new = rlhf.log_probs(params, batch["tokens"])
    divergence = rlhf.divergence(new, batch["reference"])
    aux = {"off": ((new - batch["old"]).exp() - 1).abs().mean(), "divergence": divergence}
    if args.loss == "dpo":
        return rlhf.preference_loss(new, batch), aux
    return rlhf.policy_loss(new, batch) + args.beta * divergence, aux


def start(train: Any, params: Any, args: argparse.Namespace) -> tuple[Any, fp.Sharded, list[float]]:
    """Return the state, the reference and the rewards so far: those of `--save`, if it has any."""
    if not args.save or not Path(args.save).exists():
        state = train.init(params)
        return state, train.frozen(state), []
    state, rewards = train.restore(f"{args.save}/policy"), fp.checkpoint.inspect(f"{args.save}/policy").extra["rewards"]
    like, _ = train.sharded(state)
    return state, fp.Sharded.restore(f"{args.save}/reference", like.mesh, like.specs), rewards


def arguments() -> argparse.Namespace:
    parser = rlhf.options(__doc__, "runs/grpo.png")
    parser.add_argument("--sample-mesh", help="mesh of the generation; by default the same")
    parser.add_argument("--loss", choices=("grpo", "dpo"), default="grpo")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a batch")
    parser.add_argument("--group", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--updates", type=int, default=1, help="updates with each batch")
    parser.add_argument("--beta", type=float, default=0.02, help="weight of the divergence from the reference")
    return parser.parse_args()


if __name__ == "__main__":
    main()
