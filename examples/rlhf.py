"""The pure functions of which reinforcement learning of a language model consists: prompts, scores, advantages, losses.

Shapes, one letter a dim: b samples, t tokens of prompt and answer, a tokens of the answer, p prompts, g samples of one
prompt, which are neighbours. Each function is global: a plan computes it on the shards of all ranks.

The task: a prompt is two digits, and each token of a good answer is the digit that follows the token before it.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import gpt
import optree
import torch
import torch.nn.functional as F
from einops import rearrange

import functional_parallel as fp
from sharding_specs import Mesh

CONFIG = gpt.Config(layers=2, embed=64, heads=4, vocab=16)
DIGITS, PROMPT, ANSWER = 10, 2, 6
HELD_OUT = 20  # of the 100 prompts. They are never trained on

Tensors = dict[str, torch.Tensor]


def prompts(count: int, step: int, held_out: bool = False) -> torch.Tensor:
    """Return the prompts of a step, (count, 2)."""
    order = torch.randperm(DIGITS**2, generator=torch.Generator().manual_seed(0))
    some = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    chosen = some[torch.randint(len(some), (count,), generator=torch.Generator().manual_seed(step))]
    return torch.stack([chosen // DIGITS, chosen % DIGITS], dim=1)


# --- sample ---


def plan_of(specs: Any, mesh: Mesh, stage: int = 1) -> Any:
    """Return tensor parallelism as the specs say, if the mesh has it, inside ZeRO."""
    heads = [fp.tensor_parallel("tensor", specs)] if "tensor" in mesh.axis_names else []
    return fp.chain(*heads, fp.zero(stage, "data"))


class Sampler:
    """Draws an answer to each prompt, with the parameters of a state, on the mesh of the training or on another one."""

    def __init__(self, mesh: Mesh, specs: Any) -> None:
        model, options = partial(gpt.cached_logits, config=CONFIG), {"temperature": 1.0, "buckets": (2, 8)}
        self.generator = fp.Generator(model, mesh, plan_of(specs, mesh), cache=gpt.empty_cache, **options)

    def __call__(self, params: Any, prompts: torch.Tensor, step: int) -> torch.Tensor:
        keys = fp.random.fold_in(fp.random.key(step), torch.arange(len(prompts)))
        answers = self.generator(params, prompts, max_new_tokens=ANSWER, keys=keys).tokens
        return torch.cat([prompts, answers], dim=1)

    def held_out(self, params: Any) -> float:
        """Return the mean score of answers to prompts that are never trained on."""
        return float(score(self(params, prompts(64, 0, held_out=True), 10**6)).mean())


def options(description: str | None, plot: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all runs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=2,tensor=2", help="axes and sizes, of data and tensor")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage over the data axis, 0 to 3")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--steps", type=int, default=60, help="samplings of a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--save", metavar="DIR", help="save checkpoints there; if it has some, go on from them")
    parser.add_argument("--plot", default=plot, help="where the plot of the rewards goes")
    return parser


def in_default_dtype(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.to(torch.get_default_dtype()), tree)


# --- score ---


def score(tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of tokens of each answer that follow the one before: (b, t) → (b,)."""
    before, after = tokens[:, PROMPT - 1 : -1], tokens[:, PROMPT:]
    return (after == (before + 1) % DIGITS).to(torch.get_default_dtype()).mean(1)


def reward_table(vocab: int) -> torch.Tensor:
    """Return the table of a reward model: the score of each token after each other one."""
    table = torch.zeros(vocab, vocab)
    table[torch.arange(DIGITS), torch.arange(1, DIGITS + 1) % DIGITS] = 1
    return table


def reward(params: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the reward model thinks of each answer: (b, t) → (b,)."""
    rows = F.embedding(tokens[:, PROMPT - 1 : -1], params["table"])
    return (rows * F.one_hot(tokens[:, PROMPT:], rows.shape[-1])).sum(-1).mean(1)


def log_probs(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token of the answers: (b, t) → (b, a)."""
    scores = gpt.logits(params, tokens[:, :-1], CONFIG)[:, PROMPT - 1 :]
    flat = rearrange(scores, "b a v -> (b a) v"), rearrange(tokens[:, PROMPT:], "b a -> (b a)")
    return rearrange(-F.cross_entropy(*flat, reduction="none"), "(b a) -> b a", a=ANSWER)


def values(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the score that a critic expects before each token of the answers: (b, t) → (b, a)."""
    return gpt.hidden(params, tokens[:, :-1], CONFIG)[:, PROMPT - 1 :] @ params["value"]


def finite(scores: torch.Tensor) -> torch.Tensor:
    """Return the scores.

    Raises:
        ValueError: if one is not finite: a whitened batch would have no finite advantage.
    """
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        rows = ", ".join(f"{row}: {float(scores[row])}" for row in wrong[:8])
        raise ValueError(f"{len(wrong)} of {len(scores)} rewards are not finite (sample {rows}): check the reward")
    return scores


# --- advantage ---


def group_advantage(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Whiten scores over the samples of each prompt: (b,) → (b,) (GRPO, arXiv 2402.03300, section 4.1.2)."""
    if group < 2:
        raise ValueError(
            f"{group} sample of each prompt: the advantage of a sample is over the others; draw at least 2"
        )
    of_prompt = rearrange(scores, "(p g) -> p g", g=group)
    centred = of_prompt - of_prompt.mean(1, keepdim=True)
    return rearrange(centred / (of_prompt.std(1, keepdim=True) + 1e-4), "p g -> (p g)")


def general_advantage(batch: Tensors, beta: float, decay: float = 0.95) -> Tensors:
    """Return advantages, whitened over all samples, and returns: (b, a) each (GAE, arXiv 1506.02438, equation 16).

    The reward of a token is what it costs to leave the reference. The last token also has the score of the answer.
    """
    expected, cost = batch["values"], beta * (batch["old"] - batch["reference"])
    rewards = F.pad(batch["scores"][:, None], (ANSWER - 1, 0)) - cost
    after = F.pad(expected[:, 1:], (0, 1))
    ahead, found = torch.zeros_like(batch["scores"]), list[torch.Tensor]()
    for index in reversed(range(ANSWER)):
        ahead = rewards[:, index] + after[:, index] - expected[:, index] + decay * ahead
        found.insert(0, ahead)
    advantages = torch.stack(found, dim=1)
    return {"advantage": whitened(advantages), "returns": advantages + expected}


def whitened(x: torch.Tensor) -> torch.Tensor:
    """Subtract the mean over the samples of all ranks, and divide by their standard deviation."""
    centred = x - x.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


# --- loss ---


def policy_loss(new: torch.Tensor, batch: Tensors, clip: float = 0.2) -> torch.Tensor:
    """Return the clipped objective of PPO as a loss (arXiv 1707.06347, equation 7)."""
    ratio, advantage = (new - batch["old"]).exp(), batch["advantage"]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def divergence(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an estimate of the KL divergence from the reference that is never negative (arXiv 2402.03300, eq. 4)."""
    ratio = reference - new
    return (ratio.exp() - ratio - 1).mean()


def preference_loss(new: torch.Tensor, batch: Tensors, beta: float = 0.1) -> torch.Tensor:
    """Return the loss of DPO. The better and the worse sample of a pair are neighbours (arXiv 2305.18290, eq. 7)."""
    gain = rearrange((new - batch["reference"]).sum(1), "(p two) -> two p", two=2)
    return -F.logsigmoid(beta * (gain[0] - gain[1])).mean()


def value_loss(new: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Return half the mean squared error of the critic."""
    return 0.5 * (new - returns).square().mean()


def pairs(tokens: torch.Tensor, scores: torch.Tensor, group: int) -> torch.Tensor:
    """Return the best and the worst sample of each prompt as neighbours: (b, t) → (2p, t)."""
    of_prompt = rearrange(scores, "(p g) -> p g", g=group)
    first = torch.arange(len(of_prompt)) * group
    chosen = torch.stack([first + of_prompt.argmax(1), first + of_prompt.argmin(1)], dim=1)
    return tokens[rearrange(chosen, "p two -> (p two)")]
