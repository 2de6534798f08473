"""Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740 §3.2) as a pure state machine.

float16 gradients underflow. The loss is therefore multiplied by a scale before the backward, and the gradients are
divided by it afterwards. If the scale is too high, gradients overflow: the step is skipped and the scale is reduced.
After enough clean steps the scale grows again. The state consists of tensors and `update` of torch ops, so it is
lowered with the training step and no rank waits for its host.

The rules are those of DeepSpeed (its ZeRO path). Megatron and torch use the same state machine with other constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import optree
import torch

from ..errors import LossScaleError
from ..functions import PyTree
from ..ir import is_trained
from ..quantities import is_number, is_positive_int

__all__ = ["LossScale", "LossScaleState", "has_overflow"]


class LossScaleState(NamedTuple):
    """State of a `LossScale`: replicated scalars."""

    scale: torch.Tensor  # () float64: powers of two, exact beyond float32's range
    patience: torch.Tensor  # () int64, overflows until the scale falls; 1 if the next one lowers it
    clean: torch.Tensor  # () int64, clean steps since the last overflow or the start
    exhausted: torch.Tensor  # () bool, whether a step overflowed at the minimum


@dataclass(frozen=True)
class LossScale:
    """Rules of a dynamic loss scale: `init() -> state` and `update(state, overflow) -> state`.

    `hysteresis` is a budget of overflows. An overflow reduces the budget by one; if only one is left, it divides the
    scale instead. Consecutive clean steps multiply the scale: first after window + 1 steps with `late_growth`, else
    after window, then after every window. Growth restores the hysteresis. A step that overflows is always skipped.

    >>> import torch, functional_parallel as fp
    >>> rules = fp.LossScale(initial=16.0, window=2)
    >>> state = rules.init()
    >>> for overflow in [True, True, False, False, False]:
    ...     state = rules.update(state, torch.tensor(overflow))
    ...     print(state.scale.item(), state.patience.item())
    16.0 1
    8.0 1
    8.0 1
    8.0 1
    16.0 2

    Args:
        initial: the first scale. Its logarithm to base 2 is DeepSpeed's initial_scale_power.
        window: the number of clean steps between two growths.
        hysteresis: the number of overflows until the scale falls; the last one lowers it.
        minimum: the lowest scale.
        factor: growth multiplies the scale by this factor; an overflow divides it.
        consecutive_hysteresis: whether a clean step restores the hysteresis: only consecutive overflows count.
        late_growth: whether the first growth waits for one more clean step, as in DeepSpeed.
        fail_at_minimum: whether an overflow at the minimum ends training, as in DeepSpeed (see `check`).

    Raises:
        ValueError: if the numbers do not define a scale.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    factor: float = 2.0
    consecutive_hysteresis: bool = False
    late_growth: bool = True
    fail_at_minimum: bool = True

    def __post_init__(self) -> None:
        counts = is_positive_int(self.window) and is_positive_int(self.hysteresis)
        numbers = all(map(is_number, (self.initial, self.minimum, self.factor)))  # an infinite scale never falls
        if not (counts and numbers and self.factor > 1 and 0 <= self.minimum <= self.initial):
            raise ValueError(
                f"{self!r}: integers window and hysteresis ≥ 1, and finite numbers with factor > 1 and "
                "0 ≤ minimum ≤ initial are needed"
            )

    @classmethod
    def like_megatron(cls, initial: float = 2.0**32, window: int = 1000, hysteresis: int = 2) -> LossScale:
        """Return the rules of Megatron-LM's DynamicGradScaler.

        The scale grows after `window` clean steps. An overflow at the minimum raises no error.
        """
        return cls(initial, window, hysteresis, late_growth=False, fail_at_minimum=False)

    @classmethod
    def like_torch(cls, initial: float = 2.0**16, window: int = 2000) -> LossScale:
        """Return the rules of `torch.amp.GradScaler`: no hysteresis, no minimum."""
        return cls(initial, window, 1, 0.0, late_growth=False, fail_at_minimum=False)

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        counts = (torch.tensor(self.hysteresis), torch.tensor(0))
        return LossScaleState(torch.tensor(self.initial, dtype=torch.float64), *counts, torch.tensor(False))

    def update(self, state: LossScaleState, overflow: torch.Tensor) -> LossScaleState:
        """Return the state after a step. `overflow` is () and tells whether any gradient on any rank was not finite.

        The loss of the step was multiplied by the old scale. Unscale its gradients by the *old* scale.
        """
        scale, patience, clean, exhausted = state
        falls = overflow & (patience == 1)
        waited = clean if self.late_growth else clean + 1
        grows = ~overflow & (waited > 0) & (waited % self.window == 0)
        lower = (scale / self.factor).clamp(min=self.minimum)
        refilled = grows | ~overflow if self.consecutive_hysteresis else grows
        return LossScaleState(
            torch.where(falls, lower, torch.where(grows, scale * self.factor, scale)),
            torch.where(refilled, self.hysteresis, torch.where(overflow & ~falls, patience - 1, patience)),
            torch.where(overflow, 0, clean + 1),
            exhausted | (falls & (scale <= self.minimum)) if self.fail_at_minimum else exhausted,
        )

    def check(self, state: LossScaleState) -> None:
        """Check that no step overflowed at the minimum. This waits for the device, so call it only now and then."""
        if bool(state.exhausted):
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale, {self.minimum:g}: the loss has diverged, or it needs a "
                "wider type. Lower the learning rate, clip the gradients, or use bfloat16, which needs no loss scale"
            )


def has_overflow(gradients: PyTree) -> torch.Tensor:
    """Return whether any element of a rank's gradients is infinite or NaN, as a () bool, without a host sync.

    If the gradients are sharded, sum the result over the axes that split them, so that all ranks agree.

    >>> import torch
    >>> has_overflow({"w": torch.tensor([1.0, float("inf")]), "b": torch.zeros(2)})
    tensor(True)
    """
    finite = [torch.isfinite(leaf).all() for leaf in optree.tree_leaves(gradients) if is_trained(leaf)]
    if not finite:
        raise ValueError("has_overflow: there is no floating tensor among the gradients")
    return ~torch.stack(finite).all()
