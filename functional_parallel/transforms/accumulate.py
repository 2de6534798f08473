"""Gradient accumulation: microbatches as a virtual mesh axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..collectives import MICROBATCH
from ..functions import LocalFunction, SpecTree, explain_keywords
from ..passes import ReducePerMicrobatch
from .microbatched import microbatched
from .transform import Order, Transform

__all__ = ["accumulate"]


@explain_keywords
def accumulate(microbatches: int, *, batch: SpecTree = None, reduce: str = "once") -> Transform:
    """Compute a batch in microbatches, one after another, and sum their gradients: less memory, the same result.

    The microbatches are a mesh axis that no mesh has: the function is partitioned over it as over any other, so losses
    with masks, sums or weights are those of the whole batch, where a mean of the microbatches' means would not be. The
    gradients of all microbatches are summed on each rank, and over the ranks once per step.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> plan = fp.chain(fp.data_parallel("data"), fp.accumulate(4))
    >>> step = fp.compile(fp.grad_and_value(plan(lambda w, x: ((x @ w) ** 2).mean())), Mesh(data=2))
    >>> step(torch.ones(2), torch.ones(16, 2))
    (tensor([4., 4.]), tensor(4.))
    >>> step.program.counts()[("psum", ("data",))]            # loss and gradient, once each for all microbatches
    2

    Args:
        microbatches: how many; each rank's part of the batch is cut into that many pieces, the last ones a sample
            shorter where they cannot be equal.
        batch: how the arguments after the parameters are cut, as specs over the axis "microbatch"; by default the dims
            that data axes split, or without these dim 0 of every tensor that has one.
        reduce: "once", gradients are summed over ranks after the last microbatch, or "each", after every one (ZeRO-2 as
            published): more is sent, and a rank holds its part of the sum alone.

    Raises:
        ValueError: when there is not at least one microbatch; when called, if there are more than samples.
    """
    if reduce not in ("once", "each"):
        raise ValueError(f"accumulate(reduce={reduce!r}): it is 'once' or 'each'")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"accumulate({microbatches!r}): give the number of microbatches, 1 or more")

    def apply(f: Callable[..., Any]) -> LocalFunction:
        local = microbatched(f, batch, f"accumulate({microbatches})")
        layout = replace(local.layout, virtual=((MICROBATCH, microbatches), *local.layout.virtual))
        local = local.with_layout(layout)
        return local.asking(ReducePerMicrobatch(MICROBATCH)) if reduce == "each" else local

    return Transform(f"accumulate({microbatches})", MICROBATCH, Order.ACCUMULATE, apply)
