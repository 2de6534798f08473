"""Learning-rate schedules: pure functions from the number of updates done (0 for the first) to a rate.

An optimizer accepts any such function; this module has the common ones. They consist of torch ops, so they are traced
with the step. A skipped step does not count as an update, so it does not advance them. A function with a Python `if` or
`math.cos` cannot be traced. It is called on the host in every step, with the number of updates as an integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "constant",
    "cosine",
    "exponential",
    "join",
    "linear",
    "one_cycle",
    "range_test",
    "warmup",
    "warmup_cosine_lr",
    "warmup_decay_lr",
    "warmup_lr",
]

Step = float | Tensor
Rate = Callable[[Step], Tensor]


def constant(rate: float) -> Rate:
    """Return a constant schedule.

    >>> constant(0.1)(7)
    tensor(0.1000, dtype=torch.float64)

    Args:
        rate: the rate.
    """
    return lambda step: torch.full_like(as_step(step), rate)


def linear(start: float, end: float, steps: int) -> Rate:
    """Change the rate linearly from `start` to `end`, then keep it constant. Use it as a warm-up or a decay to 0.

    >>> [linear(1.0, 0.0, 4)(step).item() for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    Args:
        start: rate of the first step.
        end: rate from step `steps` on.
        steps: number of steps from `start` to `end`; `torch.optim.lr_scheduler.LinearLR` calls it total_iters.
    """
    _check_steps("linear", steps)
    return lambda step: start + (end - start) * _progress(step, steps)


def cosine(rate: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Rate:
    """Decay along half a cosine (Loshchilov & Hutter, arXiv 1608.03983 §3), after a linear warm-up.

    >>> [round(cosine(1.0, 6, warmup=2)(step).item(), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]

    Args:
        rate: highest rate.
        steps: number of steps, including the warm-up. After them the rate stays at `end`.
        warmup: number of warm-up steps. The first has the rate rate / warmup, the last the highest rate.
        end: final rate.
    """
    _check_steps("cosine", steps - warmup)

    def fall(step: Step) -> Tensor:
        return end + (rate - end) * (1 + torch.cos(math.pi * _progress(step, steps - warmup))) / 2

    return _warmed(fall, warmup)


def exponential(rate: float, factor: float, *, every: int = 1, stairs: bool = False) -> Rate:
    """Multiply the rate by a factor every `every` steps, continuously or as a step function.

    >>> [exponential(1.0, 0.5, every=2, stairs=True)(step).item() for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]

    Args:
        rate: rate of the first step.
        factor: factor per `every` steps.
        every: number of steps.
        stairs: whether the rate is constant in between, as in `torch.optim.lr_scheduler.StepLR`.
    """
    _check_steps("exponential", every)

    def at(step: Step) -> Tensor:
        times = _periods(step, every, stairs)
        return rate * torch.pow(torch.full_like(times, factor), times)

    return at


def warmup(steps: int, schedule: float | Rate) -> Rate:
    """Warm up linearly, then run another schedule from its beginning.

    >>> [warmup(4, 1.0)(step).item() for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    Args:
        steps: number of warm-up steps. The rate grows in equal increments to the first rate of `schedule`.
        schedule: a rate or a schedule, which follows the warm-up.
    """
    return _warmed(schedule if callable(schedule) else constant(schedule), steps)


def join(*parts: tuple[int, Rate], last: Rate) -> Rate:
    """Run schedules sequentially. Each schedule counts its steps from 0.

    >>> [join((2, constant(1.0)), last=linear(0.5, 0.0, 2))(step).item() for step in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.0]

    Args:
        parts: pairs of a number of steps and the schedule of these steps.
        last: schedule of all later steps.
    """
    if not parts:
        return last
    (steps, schedule), *others = parts
    later = join(*others, last=last)
    return lambda step: torch.where(as_step(step) < steps, schedule(as_step(step)), later(as_step(step) - steps))


def as_step(step: Step) -> Tensor:
    return torch.as_tensor(step, dtype=torch.float64, device=getattr(step, "device", "cpu"))


def _progress(step: Step, steps: int) -> Tensor:
    return (as_step(step) / steps).clamp(0.0, 1.0)


def _periods(step: Step, every: int, stairs: bool) -> Tensor:
    times = as_step(step) / every
    return times.floor() if stairs else times


def _warmed(schedule: Rate, steps: int) -> Rate:
    if steps == 0:
        return schedule
    first = schedule(0)
    return join((steps, lambda step: first * (as_step(step) + 1) / steps), last=schedule)


def _check_steps(name: str, steps: int) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"schedules.{name}: it takes a number of steps of at least 1, not {steps!r}")


def warmup_lr(high: float, steps: int, *, low: float = 0.0, shape: str = "log", compat: bool = False) -> Rate:
    """DeepSpeed's WarmupLR: increase the rate from low to high, then keep it constant.

    >>> [round(warmup_lr(1.0, 5, shape="linear")(step).item(), 3) for step in range(7)]
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0]

    Args:
        high: warmup_max_lr.
        steps: warmup_num_steps. A value of 1 is replaced by 2, as in DeepSpeed.
        low: warmup_min_lr.
        shape: progress at step t. "log": ln(t + 1) / ln(steps); "linear": t / steps.
        compat: whether to count steps as DeepSpeed does, which gives the first two updates the first rate.
    """
    return _counted(_warmup(low, high, steps, shape), low, compat)


def warmup_decay_lr(
    high: float, steps: int, total: int, *, low: float = 0.0, shape: str = "log", compat: bool = False
) -> Rate:
    """DeepSpeed's WarmupDecayLR: `warmup_lr`, then a linear decay to the low rate at step `total`.

    >>> [round(warmup_decay_lr(1.0, 2, 4, shape="linear")(step).item(), 3) for step in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Args:
        high, steps, low, shape, compat: as for `warmup_lr`.
        total: total_num_steps.
    """
    rise, steps = _warmup(low, high, steps, shape), max(2, steps)
    fall = linear(low, high, max(1, int(total - steps)))  # run backwards
    return _counted(join((steps, rise), last=lambda step: fall(total - steps - step)), low, compat)


def warmup_cosine_lr(
    rate: float,
    steps: int,
    total: int,
    *,
    low: float = 0.0,
    end: float = 1e-4,
    shape: str = "log",
    compat: bool = False,
) -> Rate:
    """DeepSpeed's WarmupCosineLR: a warm-up, then half a cosine. `low` and `end` are fractions of the rate.

    >>> [round(warmup_cosine_lr(1.0, 2, 4, end=0.0, shape="linear")(step).item(), 3) for step in range(6)]
    [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]

    Args:
        rate: learning rate of the optimizer.
        steps, shape: as for `warmup_lr`.
        total: total_num_steps.
        low: warmup_min_ratio.
        end: cos_min_ratio.
        compat: whether to count steps as DeepSpeed does, which gives the first update the rate 0.
    """
    rise, steps = _warmup(low, 1.0, steps, shape), max(2, steps)
    fall = cosine(1.0, max(1, int(total - steps)), end=end)
    share = join((steps, rise), last=lambda step: fall(step + 1))
    return _counted(lambda step: rate * share(step), 0.0, compat)


def one_cycle(
    low: float, high: float, first: int, second: int | None = None, *, decay: float = 0.0, decay_every: int = 0
) -> Rate:
    """DeepSpeed's OneCycle (Smith, arXiv 1803.09820): increase, decrease, then a slow hyperbolic decay.

    >>> [round(one_cycle(0.0, 1.0, 2, 4)(step).item(), 2) for step in range(8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    Args:
        low: cycle_min_lr.
        high: cycle_max_lr.
        first: cycle_first_step_size, number of steps of the increase.
        second: cycle_second_step_size, number of steps of the decrease; `first` by default.
        decay: decay_lr_rate r. The rate k steps after the cycle is low / (1 + r k / decay_every).
        decay_every: decay_step_size; 0 disables the decay.
    """
    second = first if second is None else second
    _check_steps("one_cycle", min(first, second))
    rise, fall = linear(0.0, 1.0, first), linear(0.0, 1.0, second)
    height = join((first, rise), last=lambda step: 1 - fall(step))

    def at(step: Step) -> Tensor:
        after = (as_step(step) - (first + second)).clamp(min=0.0) / decay_every if decay_every else 0.0
        return (low + (high - low) * height(step)) / (1 + decay * after)

    return at


def range_test(low: float, size: int, *, rate: float = 1.0, stairs: bool = False) -> Rate:
    """DeepSpeed's LRRangeTest: increase the rate until the loss diverges, to find the bounds of a cycle.

    >>> [round(range_test(0.1, 2)(step).item(), 3) for step in range(4)]
    [0.1, 0.15, 0.2, 0.25]

    Args:
        low: lr_range_test_min_lr.
        size: lr_range_test_step_size.
        rate: lr_range_test_step_rate. After `size` steps the learning rate is low · (1 + rate).
        stairs: lr_range_test_staircase.
    """
    _check_steps("range_test", size)
    return lambda step: low * (1 + rate * _periods(step, size, stairs))


def _warmup(low: float, high: float, steps: int, shape: str) -> Rate:
    _check_steps("warmup_lr", steps)
    if shape not in ("log", "linear"):
        raise ValueError(f"schedules: a warm-up is of shape 'log' or 'linear', not {shape!r}")
    if shape == "linear":
        return linear(low, high, max(2, steps))

    def at(step: Step) -> Tensor:
        share = torch.log1p(as_step(step).clamp(min=0.0)) / math.log(max(2, steps))
        return low + (high - low) * share.clamp(max=1.0)

    return at


def _counted(schedule: Rate, before: float, compat: bool) -> Rate:
    """Count steps as DeepSpeed does if `compat`: from -1, after each update. Step -1 has the rate `before`."""
    return join((1, constant(before)), last=schedule) if compat else schedule
