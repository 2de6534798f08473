"""A small transformer-like loss, a task that it can learn, and what a program says of types."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import split

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt

CONFIG = gpt.Config(layers=2, embed=32, heads=2, time=16, vocab=32)


def model() -> tuple[Any, Any]:
    """Parameters of a small GPT, and their specs."""
    return split(gpt.init(CONFIG))


loss = partial(gpt.loss, config=CONFIG)


def tokens(step: int, batch: int = 8) -> Tensor:
    """Bytes that count up by three: predictable but for the first."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(0, CONFIG.vocab, (batch, 1), generator=generator) + 3 * torch.arange(17)) % CONFIG.vocab


def collectives(step: Any) -> set[tuple[str, str, torch.dtype]]:
    """Kind, phase and type of every collective of a program that moves more than a few scalars."""
    found = step.program.collectives()
    return {(each.kind, each.phase, each.operand.dtype) for each in found if each.operand.numel > 4}


def types_of(program: Any, *names: str) -> set[torch.dtype]:
    """The types of the tensors that ops of these names take."""
    found = set()
    for node in program.traced.nodes:
        if any(f"aten.{name}." in str(node.target) for name in names):
            found |= {info(operand).aval.dtype for operand in node.all_input_nodes}
    return {dtype for dtype in found if dtype.is_floating_point}


def lowered(f: Any, mesh: Any, *args: Any) -> Any:
    """The compiled step of a function's gradient, with its program."""
    step = fp.compile(fp.grad_and_value(f), mesh)
    step.lower(*args)
    return step
