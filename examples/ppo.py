"""Train a small GPT by PPO, with four models on one mesh: actor, frozen reference, critic and reward model.

    python examples/ppo.py --mesh data=2,tensor=2
    torchrun --nproc-per-node 4 examples/ppo.py --mesh data=2,tensor=2

The actor and the critic are training states with an optimizer each. The reference and the reward model are parameters
that stay on the ranks. Advantages are whitened over the samples of all ranks. A checkpoint has all four models:
with `--save` a run that was ended goes on with the same curve.
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

import functional_parallel as fp
from sharding_specs import Mesh, P, annotate, split

ROWS = {name: P("data") for name in ("scores", "old", "reference", "values")}


def main() -> None:
    args = arguments()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    say = print if fp.is_main_rank() else (lambda *_: None)
    models = Models(Mesh.parse(args.mesh), args)
    state, rewards = models.start(args.save)
    say(f"held out, before: reward {models.sample.held_out(state['actor']):.3f}")
    while len(rewards) < args.steps:
        tokens = models.sample(state["actor"], rlhf.prompts(args.samples, len(rewards)), len(rewards))
        batch = models.judged(state, tokens)
        rewards.append(float(rlhf.score(tokens).mean()))
        for update in range(args.updates):
            state["actor"], of_actor = models.actor(state["actor"], batch)
            state["critic"], of_critic = models.critic(state["critic"], batch)
            if not update:
                told = f"|ratio − 1| {of_actor.aux['off']:.1e}, divergence {of_actor.aux['divergence']:.4f}"
        say(f"{len(rewards) - 1}: reward {rewards[-1]:.3f}, {told}, critic {of_critic.loss:.4f}")
    say(f"held out, after: reward {models.sample.held_out(state['actor']):.3f}")
    if args.save:
        models.save(state, args.save, rewards)
    reporting.curve(rewards, Path(args.plot), "PPO")


class Models:
    """The programs of the four models on a mesh. A state has "actor", "critic", "reference" and "reward"."""

    def __init__(self, mesh: Mesh, args: argparse.Namespace) -> None:
        self.mesh, vocab = mesh, rlhf.CONFIG.vocab
        params, specs = split(gpt.init(rlhf.CONFIG, seed=0))
        body = {name: each for name, each in gpt.init(rlhf.CONFIG, seed=1).items() if name != "head"}
        valued, valued_specs = split(body | {"value": annotate(torch.zeros(rlhf.CONFIG.embed), "e")})
        table, table_specs = split({"table": annotate(rlhf.reward_table(vocab), "v w/tensor")})
        self.params = {"actor": params, "critic": valued, "reward": table}
        self.params = {name: rlhf.in_default_dtype(each) for name, each in self.params.items()}
        self.reward_specs = {name: spec.only(mesh.axis_names) for name, spec in table_specs.items()}
        of_actor, of_critic = (rlhf.plan_of(each, mesh, args.zero) for each in (specs, valued_specs))
        of_reward = rlhf.plan_of(self.reward_specs, mesh, 0)

        loss = partial(actor_loss, clip=args.clip)
        self.actor = fp.train_step(loss, fp.optim.adamw(args.lr), mesh, of_actor, has_aux=True, clip=1.0)
        self.critic = fp.train_step(critic_loss, fp.optim.adamw(args.lr), mesh, of_critic, clip=1.0)
        self.log_probs = self.actor.compile(of_actor(rlhf.log_probs))
        self.of_reference = fp.compile(of_actor(rlhf.log_probs), mesh)
        self.values = self.critic.compile(of_critic(rlhf.values))
        self.reward = fp.compile(of_reward(rlhf.reward), mesh)
        advantage = partial(rlhf.general_advantage, beta=args.beta)
        self.advantage = fp.compile(fp.partition(advantage, "data", (ROWS,), P("data")), mesh)
        self.sample = rlhf.Sampler(mesh, specs)

    def judged(self, state: dict[str, Any], tokens: torch.Tensor) -> rlhf.Tensors:
        """Return samples with what the four models say of them."""
        found = {
            "scores": rlhf.finite(self.reward(state["reward"], tokens)),
            "old": self.log_probs(state["actor"], tokens),
            "reference": self.of_reference(state["reference"], tokens),
            "values": self.values(state["critic"], tokens),
        }
        return found | self.advantage(found) | {"tokens": tokens}

    def start(self, folder: str | None) -> tuple[dict[str, Any], list[float]]:
        """Return the four models and the rewards so far: those of a folder, if it has any."""
        steps, is_new = {"actor": self.actor, "critic": self.critic}, not folder or not Path(folder).exists()
        states = {
            name: step.init(self.params[name]) if is_new else step.restore(f"{folder}/{name}")
            for name, step in steps.items()
        }
        actor, _ = self.actor.sharded(states["actor"])
        if is_new:
            reward = fp.Sharded.of(self.params["reward"], self.mesh, self.reward_specs)
            return states | {"reference": actor.copy(), "reward": reward}, []
        specs = {"reference": actor.specs, "reward": self.reward_specs}
        frozen = {name: fp.Sharded.restore(f"{folder}/{name}", self.mesh, each) for name, each in specs.items()}
        return states | frozen, fp.checkpoint.inspect(f"{folder}/actor").extra["rewards"]

    def save(self, state: dict[str, Any], folder: str, rewards: list[float]) -> None:
        self.actor.save(state["actor"], f"{folder}/actor", extra={"rewards": rewards})
        self.critic.save(state["critic"], f"{folder}/critic")
        for name in ("reference", "reward"):
            state[name].save(f"{folder}/{name}", step=len(rewards))


def actor_loss(params: Any, batch: rlhf.Tensors, clip: float) -> tuple[torch.Tensor, rlhf.Tensors]:
    new = rlhf.log_probs(params, batch["tokens"])
    off = ((new - batch["old"]).exp() - 1).abs().mean()
    aux = {"off": off, "divergence": rlhf.divergence(new, batch["reference"])}
    return rlhf.policy_loss(new, batch, clip), aux


def critic_loss(params: Any, batch: rlhf.Tensors) -> torch.Tensor:
    return rlhf.value_loss(rlhf.values(params, batch["tokens"]), batch["returns"])


def arguments() -> argparse.Namespace:
    parser = rlhf.options(__doc__, "runs/ppo.png")
    parser.add_argument("--samples", type=int, default=128, help="samples of a batch")
    parser.add_argument("--updates", type=int, default=2, help="updates with each batch")
    parser.add_argument("--clip", type=float, default=0.2, help="largest change of the ratio")
    parser.add_argument("--beta", type=float, default=0.01, help="what a token costs by its divergence")
    return parser.parse_args()


if __name__ == "__main__":
    main()
