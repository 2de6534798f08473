"""Partitioning of a function over microbatches, a virtual mesh axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from sharding_specs import P, broadcast_specs

from ..collectives import MICROBATCH, snapshot
from ..functions import Layout, LocalFunction, PyTree, SpecTree, as_local_function
from ..partition import Partitioning
from ..requests import DataAxis
from .parallel import batch_arg_specs

__all__ = ["microbatched"]


def microbatched(f: Callable[..., Any], batch: SpecTree, describe: str) -> LocalFunction:
    """Partition `f` over microbatches. The result computes one microbatch and completes its sums over all microbatches.

    `fp.compile` and `fp.train_step` bind the microbatch axis. If nothing binds it, the result computes the full batch
    like `f`. This is needed for a derivative of torch.func, which `fp.compile` treats as a plain function: it must be a
    derivative of `f` itself. Specs in `batch` are over the axis "microbatch". By default they cut the dims that data
    axes split, or without data axes dim 0.
    """
    inner = f if isinstance(f, LocalFunction) else as_local_function(f)

    def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        cut = _as_data_axes_cut(inner.layout, args) if batch is None else None
        return (P(), *(batch_arg_specs(args, batch, P(MICROBATCH)) if cut is None else cut))

    local = Partitioning(describe, MICROBATCH, in_specs).apply(f)

    def call(*args: PyTree) -> tuple[PyTree, SpecTree]:
        if MICROBATCH in snapshot():
            return local.run(*args), local.results
        return inner(*args), inner.results  # checked, unlike the layout with microbatches

    return LocalFunction(call, local.layout, local.name)


def _as_data_axes_cut(layout: Layout, args: tuple[PyTree, ...]) -> tuple[SpecTree, ...] | None:
    """Return specs that cut the dims of the batch that data axes split; None if they split nothing.

    An argument that they replicate, such as a teacher's weights, is not part of the batch.
    """
    data = {each.axis for each in layout.all(DataAxis)}

    def cut(spec: P) -> P:
        dim = next((dim for dim, axes in enumerate(spec.dim_axes()) if data.intersection(axes)), None)
        return P() if dim is None else P(*[None] * dim, MICROBATCH)

    full = zip(layout.arguments(args)[1:], args[1:], strict=False)
    specs = tuple(optree.tree_map(cut, broadcast_specs(spec, arg)) for spec, arg in full)
    return specs if any(spec.axes for spec in optree.tree_leaves(specs)) else None
