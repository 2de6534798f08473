"""Range checks of hyperparameters when an optimizer is built. Invalid values would make training fail silently."""

from __future__ import annotations

from typing import Any

import torch

from ..functions import written_here
from ..quantities import is_non_negative, is_number

__all__ = ["require_betas", "require_not_negative", "require_rate"]


def require_rate(optimizer: str, lr: Any) -> None:
    """Raise ValueError unless `lr` is a number of at least 0, a scalar tensor or a function."""
    if callable(lr) or (isinstance(lr, torch.Tensor) and lr.ndim == 0) or is_non_negative(lr):
        return
    instead = written_here(lr)
    if instead:
        raise ValueError(f"{optimizer}(lr=…): {instead}")
    raise ValueError(
        f"{optimizer}(lr={lr!r}): a learning rate is a number of at least 0, or a function from the number of updates "
        "done to one, such as those of fp.optim.schedules"
    )


def require_not_negative(optimizer: str, **values: Any) -> None:
    """Raise ValueError for a value that is not a number of at least 0."""
    for name, value in values.items():
        if not is_non_negative(value):
            raise ValueError(f"{optimizer}({name}={value!r}): give a number of at least 0")


def require_betas(optimizer: str, betas: Any) -> None:
    """Raise ValueError unless `betas` are two numbers in [0, 1)."""
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ValueError(f"{optimizer}(betas={betas!r}): give two numbers of at least 0 and less than 1")
