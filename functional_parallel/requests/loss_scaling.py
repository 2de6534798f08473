"""Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740 §3.2) as a pure state machine.

`update` consists of torch ops, so it is lowered with the training step and no rank waits for its host. The rules are
DeepSpeed's (its ZeRO path). Megatron and torch use the same state machine with other constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import optree
import torch

from ..errors import LossScaleError
from ..functions import Applied, PyTree
from ..ir import scalar_beside
from ..ops import NumberBeside
from ..quantities import is_number, is_positive_int
from .state_request import StateRequest, Update, UpdateLayouts


class LossScaleState(NamedTuple):
    scale: torch.Tensor  # () float64: powers of two, exact beyond float32's range
    patience: torch.Tensor  # () int64, overflows until the scale falls; 1 if the next overflow lowers it
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
        hysteresis: the number of overflows until the scale falls; the last overflow lowers it.
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
        values = ((self.initial, torch.float64), (self.hysteresis, torch.int64), (0, torch.int64), (False, torch.bool))
        return LossScaleState(*(torch.tensor(value, dtype=dtype, device="cpu") for value, dtype in values))

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
        if bool(state.exhausted.any()):  # replicas have one scale each
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale, {self.minimum:g}: the loss has diverged, or it needs a "
                "wider type. Lower the learning rate, clip the gradients, or use bfloat16, which needs no loss scale"
            )


class ScaledState(NamedTuple):
    optimizer: PyTree
    loss_scale: LossScaleState


@dataclass(frozen=True)
class ScaleLoss(StateRequest):
    rules: LossScale
    tree: ClassVar[type[ScaledState]] = ScaledState
    may_skip: ClassVar[bool] = True

    def init(self, params: PyTree, applied: Applied, layouts: UpdateLayouts) -> LossScaleState:
        first = self.rules.init()
        return LossScaleState(*(scalar_beside(params, x.item(), x.dtype) for x in first))

    def loss(self, value: torch.Tensor, leaves: LossScaleState) -> torch.Tensor:
        return value.float() * leaves.scale.float()

    def gradients(self, gradients: PyTree, leaves: LossScaleState) -> PyTree:
        scale = NumberBeside(leaves.scale)

        def unscaled(gradient: torch.Tensor) -> torch.Tensor:
            wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient  # float16 does not hold 2 ** 16
            return (wide / scale(gradient).to(wide.dtype)).to(gradient.dtype)

        return optree.tree_map(unscaled, gradients)  # None stays None

    def updated(self, update: Update, leaves: LossScaleState) -> tuple[Update, LossScaleState]:
        overflow = _overflow(update.norm)
        params = _select(overflow, update.old_params, update.params)
        state = _select(overflow, update.old_state, update.state)
        return replace(update, params=params, state=state), self.rules.update(leaves, overflow)

    def metrics(self, norm: torch.Tensor | None, leaves: LossScaleState) -> dict[str, Any]:
        return {"skipped": _overflow(norm), "loss_scale": leaves.scale}

    def check(self, leaves: LossScaleState) -> None:
        self.rules.check(leaves)

    def __str__(self) -> str:
        return f"loss scaled from {self.rules.initial:g}"


def _overflow(norm: torch.Tensor | None) -> torch.Tensor:
    assert norm is not None  # a step that may be skipped computes it
    return ~torch.isfinite(norm)  # a sum over all ranks, so all of them agree


def _select(condition: torch.Tensor, old: PyTree, new: PyTree) -> PyTree:
    beside = NumberBeside(condition)
    return optree.tree_map(lambda a, b: torch.where(beside(b), a, b) if isinstance(b, torch.Tensor) else b, old, new)
