"""Transforms and their composition.

A transform is a value. It maps a function to a local function, and has a name and a position in the legal order.
`chain(a, b)(f)` is `b(a(f))`: the first transform is innermost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType

from ..errors import OrderError
from ..functions import LocalFunction, PyTree, require_function
from ..requests import Order, require_order


@dataclass(frozen=True)
class Transform:
    """One transform."""

    name: str
    axis: str | None  # of the mesh
    order: Order
    apply: Callable[[Callable[..., PyTree]], LocalFunction]

    def __post_init__(self) -> None:
        if not isinstance(self.axis, (str, NoneType)):
            raise TypeError(
                f"{self.name}: a transform takes one axis of the mesh, by its name, not {self.axis!r}; for several "
                "fp.chain one transform for each, the first innermost"
            )

    def __call__(self, f: Callable[..., PyTree]) -> LocalFunction:
        if not isinstance(f, LocalFunction):
            require_function(f, self.name)
        local = self.apply(f)
        require_order(local.layout.requests)
        return local

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return (self,)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Plan:
    """Chain of transforms, which is itself a transform."""

    transforms: tuple[Transform, ...]

    def __call__(self, f: Callable[..., PyTree]) -> Callable[..., PyTree]:
        for transform in self.transforms:
            f = transform(f)
        return f

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"


def chain(*transforms: Transform | Plan) -> Plan:
    """Compose transforms, the first innermost: `chain(a, b)(f)` is `b(a(f))`.

    >>> import functional_parallel as fp
    >>> fp.chain(fp.tensor_parallel("tensor", {}), fp.data_parallel("data"))
    chain(tensor_parallel('tensor'), data_parallel('data'))

    Args:
        transforms: transforms or chains of them, in the order precision and remat, tensor and sequence, zero / data,
            accumulate, pipeline, local SGD.

    Raises:
        TypeError: if an argument is not a transform.
        OrderError: if the order is illegal, or if two transforms use the same axis. Also if the chain contains both
            accumulate and pipeline, because both cut the batch. For an illegal order, the message has the legal one.
    """
    for transform in transforms:
        if not isinstance(transform, (Transform, Plan)):
            raise TypeError(
                f"chain takes transforms, such as fp.tensor_parallel(…) or fp.zero(3, 'data'), not {transform!r}; "
                "apply other functions, grad and vmap among them, to plan(loss)"
            )
    flat = tuple(single for transform in transforms for single in transform.transforms)
    _check_microbatches(flat)
    _check_order(flat)
    _check_axes(flat)
    return Plan(flat)


def _check_microbatches(transforms: tuple[Transform, ...]) -> None:
    by_order = {transform.order: transform for transform in transforms}
    if {Order.ACCUMULATE, Order.PIPELINE} <= by_order.keys():
        raise OrderError(
            f"{by_order[Order.PIPELINE]!r} sums the gradients of its microbatches itself: leave "
            f"{by_order[Order.ACCUMULATE]!r} out, and give the pipeline as many times more microbatches"
        )


def _check_order(transforms: tuple[Transform, ...]) -> None:
    for before, after in itertools.pairwise(transforms):
        if before.order > after.order:
            right = ", ".join(map(repr, sorted(transforms, key=lambda transform: transform.order)))
            raise OrderError(
                f"{after!r} ({after.order.words}) stands outside {before!r} ({before.order.words}), but belongs inside "
                f"it; write chain({right})"
            )


def _check_axes(transforms: tuple[Transform, ...]) -> None:
    taken: dict[str, Transform] = {}
    for transform in transforms:
        if transform.axis is None:
            continue
        other = taken.setdefault(transform.axis, transform)
        if other is not transform:
            raise OrderError(
                f"{other!r} and {transform!r} both take the axis {transform.axis!r}; each axis goes to one transform"
            )
