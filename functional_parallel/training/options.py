"""What `train_step` was asked for: refused where it is written, before it is taken for something else."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ..quantities import is_limit

__all__ = ["require_options"]


def require_options(optimizer: Any, plan: Any, clip: Any, seed: Any, batch: Any, reduction: Any) -> None:
    """Refuse options of `train_step` that mean nothing.

    Args:
        optimizer, plan, clip, seed, batch, reduction: as for `train_step`.

    Raises:
        ValueError, TypeError: for one that it does not take, naming what it does.
    """
    if batch not in ("global", "own"):
        raise ValueError(f"train_step(batch={batch!r}): it is 'global' or 'own'")
    if reduction not in ("fast", "ordered"):
        raise ValueError(
            f"train_step(reduction={reduction!r}): it is 'fast' or 'ordered', the order in which ranks are summed; "
            "whether gradients are of a sum or a mean, the loss says"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise TypeError(f"train_step(seed={seed!r}): it is an integer, or None where nothing is drawn")
    if clip is not None and not is_limit(clip):
        raise ValueError(
            f"train_step(clip={clip!r}): the bound on the gradients' global norm is a number above 0, or None for none"
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            "train_step takes an optimizer from fp.optim, a pair of functions (init, update), "
            f"not {type(optimizer).__name__}"
        )
    if plan is not None and not callable(plan):
        raise TypeError(f"train_step takes a plan, a transform or fp.chain of them, not {plan!r}")
