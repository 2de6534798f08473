"""A residual network with a stack of layers, in the forms that tests of passes need."""

from __future__ import annotations

from typing import Any

import torch

Params = dict[str, Any]

SPLIT = {"layers/*/a": "inner outer/tensor", "layers/*/b": "inner/tensor outer"}


def parameters(layers: int, width: int = 8, classes: int = 4, integers: bool = False) -> Params:
    """Float64 parameters; integers make sums exact."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-2, 3, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

    stack = [{"a": draw(width, 2 * width), "b": draw(2 * width, width)} for _ in range(layers)]
    return {"layers": stack, "head": draw(width, classes)}


def batch(size: int, width: int = 8, classes: int = 4, integers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (size, width), generator=generator).double()
    if not integers:
        x = x + torch.randn(size, width, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (size,), generator=generator)
    y[torch.rand(size, generator=generator) < 0.3] = -100
    y[0] = 0
    return x, y


def hidden(params: Params, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x + torch.relu(x @ layer["a"]) @ layer["b"]
    return x


def loss(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the targets that count."""
    return torch.nn.functional.cross_entropy(hidden(params, x) @ params["head"], y)


def integer_loss(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum of products: exact on integers, its gradient included."""
    return (hidden(params, x) @ params["head"]).relu().sum()


def noisy_loss(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With dropout."""
    for layer in params["layers"]:
        x = torch.nn.functional.dropout(x + torch.relu(x @ layer["a"]) @ layer["b"], 0.2)
    return torch.nn.functional.cross_entropy(x @ params["head"], y)
