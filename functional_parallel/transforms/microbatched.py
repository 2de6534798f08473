"""A function partitioned over microbatches, the axis that no mesh has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharding_specs import P

from ..collectives.axes import MICROBATCH, snapshot
from ..local_function import LocalFunction, PyTree, SpecTree, unsharded
from ..partition import partition
from .parallel import rest_specs

__all__ = ["microbatched"]


def microbatched(f: Callable[..., Any], batch: SpecTree, describe: str) -> LocalFunction:
    """The function of one microbatch, its sums completed over all; of the whole batch where nothing binds their axis.

    `fp.compile` and `fp.train_step` bind the axis. A derivative of torch.func is a plain function to them, and what it
    is a derivative of must then be the function itself: it is, since one microbatch can be the whole batch.

    Args:
        f: the function.
        batch: how the arguments after the parameters are cut, as specs over the axis "microbatch"; by default dim 0.
        describe: what is done to it, in words.
    """

    def in_specs(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
        return (P(), *rest_specs(args, batch, P(MICROBATCH)))

    inner = f if isinstance(f, LocalFunction) else unsharded(f)
    local = partition(f, MICROBATCH, in_specs, describe=describe)

    def call(*args: PyTree) -> tuple[PyTree, SpecTree]:
        if MICROBATCH in snapshot():
            return local.run(*args), local.results
        return inner(*args), inner.results  # checked: the layout with microbatches was not

    return LocalFunction(call, local.layout, local.name)
