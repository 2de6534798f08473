"""A model of two leaves, for tests of files and folders."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh

__all__ = ["PARAMS", "small_step"]

PARAMS = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3)}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] + p["b"]).square().mean()


def small_step(**options: Any) -> Any:
    """A training step whose state has moments, sharded over two ranks."""
    return fp.train_step(loss, fp.optim.sgd(0.1, momentum=0.9), Mesh(data=2), fp.zero(3, "data"), **options)
