"""What an optimizer's numbers may be, checked where it is made: a wrong one would train on, and to nothing."""

from __future__ import annotations

from typing import Any

import torch

from ..functions import written_here
from ..quantities import is_non_negative, is_number

__all__ = ["require_betas", "require_not_negative", "require_rate"]


def require_rate(optimizer: str, lr: Any) -> None:
    """Refuse what is neither a learning rate, as a number or a scalar tensor, nor a function that makes them."""
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
    """Refuse what is no number of at least 0."""
    for name, value in values.items():
        if not is_non_negative(value):
            raise ValueError(f"{optimizer}({name}={value!r}): give a number of at least 0")


def require_betas(optimizer: str, betas: Any) -> None:
    """Refuse weights of moving averages that are no two numbers in [0, 1)."""
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ValueError(f"{optimizer}(betas={betas!r}): give two numbers of at least 0 and less than 1")
