"""Gradient accumulation: microbatches as a virtual mesh axis."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import optree

from sharding_specs import P, SpecError, as_spec

from ..collectives import MICROBATCH
from ..functions import Applied, LocalFunction, PyTree, Resolved, SpecTree, explain_keywords
from ..partitioner import Partitioning
from ..passes import ReducePerMicrobatch
from ..quantities import is_positive_int
from ..requests import DataAxis, Microbatches, Order, RunPass
from .argument_specs import batch_arg_specs, batch_lies
from .transform import Transform


@explain_keywords
@dataclass(frozen=True)
class accumulate(Transform):
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

    microbatches: int
    _: KW_ONLY
    batch: SpecTree = None
    reduce: str = "once"
    axis: ClassVar[str] = MICROBATCH
    order: ClassVar[Order] = Order.ACCUMULATE
    shown: ClassVar[tuple[str, ...]] = ("microbatches",)

    def __post_init__(self) -> None:
        if self.reduce not in ("once", "each"):
            raise ValueError(f"accumulate(reduce={self.reduce!r}): it is 'once' or 'each'")
        if not is_positive_int(self.microbatches):
            raise ValueError(f"{self.name}: give the number of microbatches, 1 or more")

    def apply(self, f: LocalFunction) -> LocalFunction:
        local = microbatched(f, self.batch, self.name)
        local = local.requesting(Microbatches(MICROBATCH, self.microbatches))
        return local.requesting(RunPass(ReducePerMicrobatch(MICROBATCH))) if self.reduce == "each" else local


def microbatched(f: LocalFunction, batch: SpecTree, describe: str) -> LocalFunction:
    """Partition `f` over microbatches. The result computes one microbatch and completes its sums over all microbatches.

    `fp.compile` and `fp.train_step` bind the microbatch axis. If nothing binds it, the result computes the full batch
    like `f`. This is needed for a derivative of torch.func, which `fp.compile` treats as a plain function: it must be a
    derivative of `f` itself.
    """

    def in_specs(inner: Resolved) -> tuple[SpecTree, ...]:
        cut = _as_data_axes_cut(f.applied, inner) if batch is None else None
        found = batch_arg_specs(inner.args, batch, P(MICROBATCH)) if cut is None else cut
        if batch is not None and found and not names_microbatches(found):
            raise SpecError(
                f"{describe}, batch={batch!r}: no argument is cut into microbatches; write P({MICROBATCH!r}) to cut "
                "dim 0, or leave batch= out to cut the dims that data axes split"
            )
        return (P(), *found)

    lies = ("", batch_lies(batch, MICROBATCH, "the dims that data axes split, or dim 0,"))
    how = Partitioning(describe, MICROBATCH, in_specs, lies=lies)
    local = how.apply(f)

    def resolve(inner: Resolved) -> Resolved:
        bound = MICROBATCH in inner.mesh.axis_names
        return how.resolve(inner, f.applied.axes) if bound else inner.outside(describe, inner.specs, inner.own)

    def call(resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        bound = MICROBATCH in resolved.mesh.axis_names
        return local.run(resolved, *args) if bound else f.run(resolved.inside, *args)

    applied = replace(local.applied, resolvers=(*f.applied.resolvers, resolve))
    return LocalFunction(call, applied, local.name)


def names_microbatches(specs: SpecTree) -> bool:
    return any(MICROBATCH in as_spec(each).named_axes for each in optree.tree_leaves(specs))


def _as_data_axes_cut(applied: Applied, inner: Resolved) -> tuple[SpecTree, ...] | None:
    data = {each.axis for each in applied.all(DataAxis)}

    def cut(spec: P) -> P:
        dim = next((dim for dim, axes in enumerate(spec.dim_axes()) if data.intersection(axes)), None)
        return P() if dim is None else P(*[None] * dim, MICROBATCH)

    specs: tuple[SpecTree, ...] = optree.tree_map(cut, inner.arguments[1:])
    return specs if any(spec.axes for spec in optree.tree_leaves(specs)) else None
