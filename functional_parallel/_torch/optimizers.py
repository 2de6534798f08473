"""Hooks of torch's optimizers, which have no public list."""

from __future__ import annotations

import torch

__all__ = ["has_step_hooks"]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions are registered that an optimizer calls before or after each step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
