"""A function partitioned over microbatches, the axis that no mesh has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from sharding_specs import P, broadcast_specs

from ..collectives import MICROBATCH, snapshot
from ..functions import Layout, LocalFunction, PyTree, SpecTree, as_local_function
from ..partition import partition
from .parallel import batch_arg_specs

__all__ = ["microbatched"]


def microbatched(f: Callable[..., Any], batch: SpecTree, describe: str) -> LocalFunction:
    """The function of one microbatch, its sums completed over all; of the whole batch where nothing binds their axis.

    `fp.compile` and `fp.train_step` bind the axis. A derivative of torch.func is a plain function to them, and what it
    is a derivative of must then be the function itself: it is, since one microbatch can be the whole batch.

    Args:
        f: the function.
        batch: how the arguments after the parameters are cut, as specs over the axis "microbatch"; by default where
            the data axes split them, or if there are none dim 0.
        describe: what is done to it, in words.
    """

    inner = f if isinstance(f, LocalFunction) else as_local_function(f)

    def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        cut = _as_data_axes_cut(inner.layout, args) if batch is None else None
        return (P(), *(batch_arg_specs(args, batch, P(MICROBATCH)) if cut is None else cut))

    local = partition(f, MICROBATCH, in_specs, describe=describe)

    def call(*args: PyTree) -> tuple[PyTree, SpecTree]:
        if MICROBATCH in snapshot():
            return local.run(*args), local.results
        return inner(*args), inner.results  # checked: the layout with microbatches was not

    return LocalFunction(call, local.layout, local.name)


def _as_data_axes_cut(layout: Layout, args: tuple[PyTree, ...]) -> tuple[SpecTree, ...] | None:
    """The dims of the batch that data axes split; None if they split nothing.

    What they leave whole, as a teacher's weights, is no batch.
    """
    data = set(layout.data_axes)

    def cut(spec: P) -> P:
        dim = next((dim for dim, axes in enumerate(spec.dim_axes()) if data.intersection(axes)), None)
        return P() if dim is None else P(*[None] * dim, MICROBATCH)

    full = zip(layout.arguments(args)[1:], args[1:], strict=False)
    specs = tuple(optree.tree_map(cut, broadcast_specs(spec, arg)) for spec, arg in full)
    return specs if any(spec.axes for spec in optree.tree_leaves(specs)) else None
