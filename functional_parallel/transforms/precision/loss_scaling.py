"""Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740 §3.2) as a pure state machine.

float16 gradients underflow, so the loss is multiplied by a scale before the backward and the gradients divided by it
after. A scale that is too high overflows: that step is skipped, and the scale falls; after enough clean steps it rises
again. The state is tensors and `update` torch ops, so that it is staged with the training step and no rank waits for
its host.

The rules are DeepSpeed's (its ZeRO path). Megatron's and torch's are the same machine with other constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from ...ir import is_trained
from ...quantities import is_number, is_positive_int

__all__ = ["LossScale", "LossScaleError", "LossScaleState", "has_overflow"]


class LossScaleError(ArithmeticError):
    """Gradients overflow at the lowest scale there is: the run has diverged, or float16 cannot hold it."""


class LossScaleState(NamedTuple):
    """State of a `LossScale`: scalars, the same on every rank."""

    scale: torch.Tensor  # () float64: powers of two, exact beyond float32's range
    patience: torch.Tensor  # () int64, overflows that the scale outlives, this one included
    clean: torch.Tensor  # () int64, clean steps since the last overflow or the start
    exhausted: torch.Tensor  # () bool, whether a step overflowed at the minimum


@dataclass(frozen=True)
class LossScale:
    """The rules of a dynamic loss scale: `init() -> state` and `update(state, overflow) -> state`.

    An overflow uses up one of `hysteresis`; with one left the scale is divided instead. Clean steps in a row multiply
    it: with `late_growth` the first time after window + 1 of them, else after window, and every window after that;
    growth refills the hysteresis. The step that overflows is skipped either way.

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
        initial: the first scale; DeepSpeed's initial_scale_power is its logarithm.
        window: clean steps between two growths.
        hysteresis: of so many overflows, the last lowers the scale.
        minimum: the lowest scale.
        factor: what the scale is multiplied and divided by.
        consecutive_hysteresis: a clean step refills the hysteresis, so only overflows in a row count.
        late_growth: whether the first growth waits for one clean step more, as in DeepSpeed.
        fail_at_minimum: whether an overflow at the minimum ends training, as in DeepSpeed (see `check`).

    Raises:
        ValueError: for numbers that make no scale.
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
        """Megatron-LM's DynamicGradScaler: grows after `window` clean steps, stays at the minimum in silence."""
        return cls(initial, window, hysteresis, late_growth=False, fail_at_minimum=False)

    @classmethod
    def like_torch(cls, initial: float = 2.0**16, window: int = 2000) -> LossScale:
        """`torch.amp.GradScaler`: no hysteresis, no minimum."""
        return cls(initial, window, 1, 0.0, late_growth=False, fail_at_minimum=False)

    def init(self) -> LossScaleState:
        """The state before the first step."""
        counts = (torch.tensor(self.hysteresis), torch.tensor(0))
        return LossScaleState(torch.tensor(self.initial, dtype=torch.float64), *counts, torch.tensor(False))

    def update(self, state: LossScaleState, overflow: torch.Tensor) -> LossScaleState:
        """The state after a step.

        Args:
            state: the state before; its `scale` is the one that the step's loss was multiplied by.
            overflow: () whether any gradient on any rank was not finite.

        Returns:
            The new state. Unscale the step's gradients by the *old* scale.
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
        """Stop a run that overflows at the minimum. This waits for the device; a training loop asks now and then.

        Raises:
            LossScaleError: when a step up to this state overflowed at the lowest scale.
        """
        if bool(state.exhausted):
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale, {self.minimum:g}: the loss has diverged, or it needs a "
                "wider type. Lower the learning rate, clip the gradients, or use bfloat16, which needs no loss scale"
            )


def has_overflow(gradients: Any) -> torch.Tensor:
    """Whether any element of a rank's gradients is infinite or not a number, as a () bool, without asking the host.

    >>> import torch
    >>> has_overflow({"w": torch.tensor([1.0, float("inf")]), "b": torch.zeros(2)})
    tensor(True)

    Args:
        gradients: a pytree; leaves that are neither floating nor complex tensors do not count. Sharded, the ranks must
            agree afterwards: sum it over the axes that split the gradients.

    Raises:
        ValueError: when there is no floating tensor.
    """
    finite = [torch.isfinite(leaf).all() for leaf in optree.tree_leaves(gradients) if is_trained(leaf)]
    if not finite:
        raise ValueError("has_overflow: there is no floating tensor among the gradients")
    return ~torch.stack(finite).all()
