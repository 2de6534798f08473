"""Range checks of hyperparameters when an optimizer is built. Invalid values would make training fail silently."""

from __future__ import annotations

import torch

from ..functions import written_here
from ..quantities import is_non_negative, is_number
from .optimizer import Schedule

__all__ = ["require"]


def require(
    optimizer: str, *, lr: Schedule = 0.0, betas: tuple[float, float] = (0.0, 0.0), **not_negative: float
) -> None:
    """Raise ValueError unless `lr` is a rate or a schedule, `betas` lie in [0, 1), and the others are not negative."""
    if not (callable(lr) or (isinstance(lr, torch.Tensor) and lr.ndim == 0) or is_non_negative(lr)):
        if instead := written_here(lr):
            raise ValueError(f"{optimizer}(lr=…): {instead}")
        raise ValueError(
            f"{optimizer}(lr={lr!r}): a learning rate is a number of at least 0, or a function from the number of "
            "updates done to one, such as those of fp.optim.schedules"
        )
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ValueError(f"{optimizer}(betas={betas!r}): give two numbers of at least 0 and less than 1")
    for name, value in not_negative.items():
        if not is_non_negative(value):
            raise ValueError(f"{optimizer}({name}={value!r}): give a number of at least 0")
