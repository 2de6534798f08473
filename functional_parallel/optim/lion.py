"""Lion, the sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..functions import PyTree, explain_keywords
from .chain import Transformation, add_decayed_weights, chained, scale_by_learning_rate
from .hyperparameters import Decay, require
from .optimizer import Optimizer, Schedule


class LionState(NamedTuple):
    """State of `lion`, half the size of Adam's."""

    step: Tensor  # () number of updates done
    mean: PyTree  # like params: moving average of gradients


@explain_keywords
def lion(
    lr: Schedule, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, decay: Decay = None
) -> Optimizer:
    """Return the optimizer Lion: every element moves by the learning rate, against the sign of a mean gradient.

    p ← p (1 − lr λ) − lr · sign(β₁ m + (1−β₁) g);  m ← β₂ m + (1−β₂) g.

    Real and imaginary components of a complex parameter are updated separately, each by its sign.

    >>> import torch
    >>> optimizer = lion(0.25)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.7500, 1.2500])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate. Use a third to a
            tenth of AdamW's.
        betas: β₁ for the step, β₂ for the average.
        weight_decay: λ, decoupled from the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("lion", lr=lr, betas=betas, weight_decay=weight_decay)
    sign, decayed = scale_by_lion(betas=betas), add_decayed_weights(weight_decay, decay)
    return chained("lion", LionState, sign, decayed, scale_by_learning_rate(lr))


@explain_keywords
def scale_by_lion(*, betas: tuple[float, float] = (0.9, 0.99)) -> Transformation:
    """Replace the update by the sign of an interpolated momentum (Chen et al., arXiv 2302.06675).

    u ← sign(β₁ m + (1−β₁) u);  m ← β₂ m + (1−β₂) u, as in `optax.scale_by_lion`.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.scale_by_lion(), fp.optim.scale_by_learning_rate(0.25))
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.7500, 1.2500])}

    Args:
        betas: β₁ for the sign, β₂ for the average.

    Returns:
        A transformation with one moment, m.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("scale_by_lion", betas=betas)
    beta1, beta2 = betas

    def one(g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return (beta1 * m + (1 - beta1) * g).sign(), beta2 * m + (1 - beta2) * g

    return Transformation(lambda step: one, 1, elementwise=True)
