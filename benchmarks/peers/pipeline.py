"""torch.distributed.pipelining: the module cut by hand into stages of equally many blocks, run by its schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from model import ADAMW, GPT, cross_entropy
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

MICROBATCHES = 8


def microbatches(samples: int) -> int:
    """As many as the batch has samples, eight at most."""
    return min(MICROBATCHES, samples)


class Part(nn.Module):
    """Some consecutive blocks of the GPT, with the embedding before the first and the head behind the last."""

    def __init__(self, whole: GPT, index: int, stages: int) -> None:
        super().__init__()
        count = len(whole.blocks)
        bounds = [count * each // stages for each in (index, index + 1)]
        self.blocks = nn.ModuleDict({str(number): whole.blocks[number] for number in range(*bounds)})
        if index == 0:
            self.tokens = whole.tokens
        if index == stages - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) if hasattr(self, "tokens") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class PipelinePeer:
    """One rank's stages under a schedule."""

    def __init__(self, module: GPT, kind: Any, chunks: int, folded: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        count = chunks * ranks
        mine = [rank, count - 1 - rank] if folded else list(range(rank, count, ranks))
        self.parts = nn.ModuleList(Part(module, index, count) for index in mine)
        device = torch.device("cpu")
        self.stages = [PipelineStage(p, i, count, device) for p, i in zip(self.parts, mine, strict=True)]
        self.kind, self.first, self.last = kind, 0 in mine, count - 1 in mine
        self.optimizer = torch.optim.AdamW(self.parts.parameters(), fused=True, **ADAMW)
        self.schedule: Any = None

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.schedule is None:
            stages = self.stages[0] if len(self.stages) == 1 else self.stages
            self.schedule = self.kind(stages, microbatches(len(tokens)), loss_fn=cross_entropy)
        inputs = (tokens[:, :-1],) if self.first else ()
        losses: list[torch.Tensor] = []
        if self.last:
            self.schedule.step(*inputs, target=tokens, losses=losses)
        else:
            self.schedule.step(*inputs)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self._run(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of all stages, on every rank."""
        self._run(tokens)
        own = {
            name.partition(".")[2]: p.grad.clone() for name, p in self.parts.named_parameters() if p.grad is not None
        }
        self.optimizer.zero_grad()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return {name: gradient for part in found for name, gradient in part.items()}

    def whole(self, loss: torch.Tensor) -> float:
        """The loss of the rank that has the last stage."""
        dist.all_reduce(loss)
        return float(loss)


def maker(kind: Any, chunks: int = 1, folded: bool = False) -> Callable[[GPT], PipelinePeer]:
    return lambda module: PipelinePeer(module, kind, chunks, folded)


PIPELINES = {
    "GPipe": maker(ScheduleGPipe),
    "1F1B": maker(Schedule1F1B),
    "interleaved 1F1B": maker(ScheduleInterleaved1F1B, chunks=2),
    "ZBV": maker(ScheduleZBVZeroBubble, chunks=2, folded=True),
}
