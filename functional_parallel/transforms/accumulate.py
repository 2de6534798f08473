"""Gradient accumulation: microbatches as a virtual mesh axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..collectives import MICROBATCH
from ..functions import LocalFunction, SpecTree, explain_keywords
from ..passes import ReducePerMicrobatch
from ..requests import Microbatches, Order, RunPass
from .microbatched import microbatched
from .transform import Transform

__all__ = ["accumulate"]


@explain_keywords
def accumulate(microbatches: int, *, batch: SpecTree = None, reduce: str = "once") -> Transform:
    """Compute a batch in sequential microbatches and sum their gradients. The result is the same with less memory.

    The microbatches form a virtual mesh axis, and the function is partitioned over it like over any other axis. A loss
    with masks, sums or weights therefore equals the loss of the full batch; a mean of the microbatches' means would
    not. The gradients of all microbatches are summed on each rank, and then once per step over the ranks.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> plan = fp.chain(fp.data_parallel("data"), fp.accumulate(4))
    >>> step = fp.compile(fp.grad_and_value(plan(lambda w, x: ((x @ w) ** 2).mean())), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(16, 2))
    (tensor([4., 4.]), tensor(4.))
    >>> step.program.counts()[("psum", ("data",))]            # loss and gradient, once each for all microbatches
    2

    Args:
        microbatches: the number of microbatches per rank. If the rank's shard of the batch is not divisible, the last
            microbatches are one sample shorter.
        batch: specs of the arguments after the parameters over the axis "microbatch". The default cuts the dims that
            data axes split, or without data axes dim 0 of every tensor that has one.
        reduce: "once" sums gradients over ranks after the last microbatch. "each" sums them after every microbatch
            (ZeRO-2 as published): it sends more, but a rank holds only its shard of the sum.

    Raises:
        ValueError: if `microbatches` is not a positive integer or `reduce` is unknown. When called, if there are more
            microbatches than samples.
    """
    if reduce not in ("once", "each"):
        raise ValueError(f"accumulate(reduce={reduce!r}): it is 'once' or 'each'")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"accumulate({microbatches!r}): give the number of microbatches, 1 or more")

    def apply(f: Callable[..., Any]) -> LocalFunction:
        local = microbatched(f, batch, f"accumulate({microbatches})")
        local = local.requesting(Microbatches(MICROBATCH, microbatches))
        return local.requesting(RunPass(ReducePerMicrobatch(MICROBATCH))) if reduce == "each" else local

    return Transform(f"accumulate({microbatches})", MICROBATCH, Order.ACCUMULATE, apply)
